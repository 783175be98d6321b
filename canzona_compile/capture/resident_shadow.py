"""What residents count for all parameters together, shown on the real optimizer, which never steps.

Users read such counters. Owners have objects that count, other ranks have none; so every rank has one more object, with
one tiny parameter per group, that takes every step too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from canzona_compile.capture.construction import atoms_of
from canzona_compile.capture.dynamo import as_written
from canzona_compile.capture.external_counters import tiny
from canzona_compile.capture.kept import Finder
from canzona_compile.capture.randomness import MatrixGenerators
from canzona_compile.capture.resident import Recipe
from canzona_compile.capture.twin import hypers, step_plainly

NAME = "the shadow of all matrices"  # seeds its generators, whose numbers reach no matrix


class ResidentShadow:
    """A small object of all parameter groups, whose shared values the real optimizer takes over.

    Args:
        optimizer: the real optimizer.
        recipe: what it keeps, and how to construct it.
        began: the hyperparameters of its groups when it was constructed.

    Raises:
        NotConstructible: the constructor fails.
    """

    def __init__(self, optimizer: Optimizer, recipe: Recipe, began: Sequence[Mapping[str, Any]]) -> None:
        self.optimizer, self.recipe = optimizer, recipe
        self._random = torch.Generator().manual_seed(0)
        self._generators = MatrixGenerators(NAME, torch.device("cpu"))
        self._params = [tiny(group["params"]) for group in optimizer.param_groups]
        groups = [{**hypers(g), "params": [p]} for g, p in zip(optimizer.param_groups, self._params, strict=True)]
        with self._generators.in_use():
            self._object = recipe.construction.make(groups, began)

    def count(self) -> None:
        """Take a step, and show what it changed. Groups without gradients do not step."""
        recipe, real = self.recipe, self.optimizer
        atoms = {name: v for name, v in atoms_of(real).items() if name not in recipe.attributes}
        vars(self._object).update(atoms)
        for own, group, param in zip(self._object.param_groups, real.param_groups, self._params, strict=True):
            own.update({k: v for k, v in hypers(group).items() if k not in recipe.hyperparameters})
            some = any(p.grad is not None for p in group["params"])
            param.grad = torch.randn(param.shape, generator=self._random, device="cpu").to(param) if some else None
        with self._generators.in_use(), as_written():
            step_plainly(self._object)
        for own, group in zip(self._object.param_groups, real.param_groups, strict=True):
            group.update({k: own[k] for k in recipe.hyperparameters if k in own})
        mine, theirs = (self._looked_into(optimizer) for optimizer in (self._object, real))
        for path in sorted(recipe.shared & mine.found.keys()):
            theirs.take_over(path, mine)

    def _looked_into(self, optimizer: Optimizer) -> Finder:
        finder = Finder(self._params[0])
        finder.look_at_attributes(optimizer, {path.split("/")[1] for path in self.recipe.shared})
        return finder
