"""What a survey knows of a package: which optimizers it has, and how each is built from a list of matrices."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer

Params = Sequence[nn.Parameter]
Shapes = tuple[tuple[int, int], ...]

SMALL: Shapes = ((10, 6), (7, 12), (10, 6))


@dataclass(frozen=True, slots=True)
class Catalog:
    """The optimizers of one package.

    Attributes:
        distribution: as the package index calls it; empty for a checkout.
        names: the optimizers.
        build: makes one of them, with its defaults or with what it needs at least.
        shapes: of the matrices that it gets.
        compiles: whether its optimizers call Inductor, so that every run of one takes a minute and more.
        needs: modules without which the package cannot be surveyed.
        alone: whether it is wrapped with `one_per_matrix=`. The state of such objects has a form of its own, and is not
            compared.
    """

    distribution: str
    names: Callable[[], list[str]]
    build: Callable[[str, Params], Optimizer]
    shapes: Shapes = SMALL
    compiles: bool = False
    needs: tuple[str, ...] = ()
    alone: bool = False

    @property
    def version(self) -> str:
        """That is installed, or empty."""
        try:
            return importlib.metadata.version(self.distribution) if self.distribution else ""
        except importlib.metadata.PackageNotFoundError:
            return ""

    @property
    def missing(self) -> str:
        """What has to be installed first; empty if nothing is missing."""
        absent = [name for name in self.needs if importlib.util.find_spec(name) is None]
        if self.distribution and not self.version:
            absent.insert(0, self.distribution)
        return ", ".join(absent)


PLACES = {
    "pytorch-optimizer": "survey_pytorch_optimizer:CATALOG",
    "heavyball": "survey_packages:HEAVYBALL",
    "schedulefree": "survey_packages:SCHEDULEFREE",
    "torchao": "survey_packages:TORCHAO",
    "bitsandbytes": "survey_packages:BITSANDBYTES",
}


def catalog(place: str, checkout: str = "") -> Catalog:
    """Find a catalog by "module:attribute".

    Args:
        place: where it is.
        checkout: a folder with the package, for what is not installed.
    """
    if checkout and checkout not in sys.path:
        sys.path.insert(0, checkout)
    module, _, attribute = place.partition(":")
    found: Catalog = getattr(importlib.import_module(module), attribute)
    return found
