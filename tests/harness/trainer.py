"""A pair whose next step is expected to fail on a rank, and what became of it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from canzona_compile.errors import CanzonaError
from tests.harness.layouts import ALONE, Case, local
from tests.harness.optimizers import EVEN, Shape
from tests.harness.pairs import Pair

SHAPES: tuple[Shape, ...] = (*EVEN, EVEN[0])
ALIKE: tuple[Shape, ...] = (EVEN[0],) * 4  # one kind, for what goes on after an error, which is captured anew
NAMES = ["first", "second", "third", "fourth"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a step ended on a rank.

    Attributes:
        error: name of the exception's class, empty if there was none; `said`: its text.
        ours: is it one that canzona_compile raises on purpose?
        changed: names of parameters and state tensors of this rank with other bits than before.
    """

    error: str
    said: str
    ours: bool
    changed: list[str]


def named_muon(params: list[Any]) -> torch.optim.Muon:
    return torch.optim.Muon(list(zip(NAMES, params, strict=True)), lr=2e-2)


class Trainer(Pair):
    """Muon of four named matrices, plain and wrapped on this rank's fragments."""

    def __init__(self, *cases: Case, shapes: Sequence[Shape] = SHAPES, **options: Any) -> None:
        super().__init__(named_muon, shapes, cases, **options)
        self.params = self.laid.params
        self.optimizer = self.wrapped

    def tensors(self) -> dict[str, Tensor]:
        """What this rank holds: fragments of parameters, and its part of the state."""
        found = {}
        for name, param in zip(NAMES, self.params, strict=True):
            found[name] = local(param)
            for leaf, value in self.optimizer.state.get(param, {}).items():
                if value is not None:  # it lies on an owner elsewhere
                    found[f"{leaf} of {name}"] = local(value)
        return found

    def last_step(self) -> Outcome:
        """A step of the wrapped optimizer that is expected to fail."""
        before = {name: value.clone() for name, value in self.tensors().items()}
        error: BaseException | None = None
        try:
            self.optimizer.step()
        except Exception as found:
            error = found
        after = self.tensors()
        changed = [n for n in after.keys() | before.keys() if n not in before or n not in after]
        changed += [n for n in before.keys() & after.keys() if not torch.equal(before[n], after[n])]
        kind = "" if error is None else type(error).__name__
        return Outcome(kind, str(error), isinstance(error, CanzonaError), sorted(changed))


def ready(**options: Any) -> functools.partial[Any]:
    """For `run(after=...)`: two steps in one process, so that ranks need not capture what these did."""
    return functools.partial(steps_alone, **options)


def steps_alone(**options: Any) -> None:
    Trainer(ALONE, **options).go(2)


def check(outcomes: Sequence[Outcome], errors: set[str], *words: str) -> None:
    """Every rank raised one of these errors, with these words in it, and changed nothing."""
    for outcome in outcomes:
        assert outcome.error in errors, outcome.said
        assert all(word in outcome.said for word in words), outcome.said
        assert outcome.changed == []
