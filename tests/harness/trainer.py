"""A pair whose next step is expected to fail on a rank, as a driver of mistakes."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.harness.layouts import ALONE, Case, local
from tests.harness.mistakes import Outcome, attempt
from tests.harness.optimizers import EVEN, Shape
from tests.harness.pairs import Pair, params_of

SHAPES: tuple[Shape, ...] = (*EVEN, EVEN[0])
ALIKE: tuple[Shape, ...] = (EVEN[0],) * 4  # one kind, for what goes on after an error, which is captured anew
NAMES = ["first", "second", "third", "fourth"]


def named_muon(params: list[Any]) -> torch.optim.Muon:
    return torch.optim.Muon(list(zip(NAMES, params, strict=True)), lr=2e-2)


class Trainer(Pair):
    """Muon of four named matrices, plain and wrapped on this rank's fragments.

    Args:
        good: how many steps go well.
    """

    def __init__(self, *cases: Case, shapes: Sequence[Shape] = SHAPES, good: int = 2, **options: Any) -> None:
        super().__init__(named_muon, shapes, cases, **options)
        self.good = good
        self.params = self.laid.params
        self.optimizer = self.wrapped

    def course(self) -> Iterator[str]:
        """Good steps, and the one that is expected to fail."""
        self.go(self.good)
        self.feed()
        yield "fed"
        self.optimizer.step()

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
        return attempt(self.optimizer.step, self.tensors)

    def go_on(self) -> list[str]:
        """Set right what one rank has wrong, and train; what is not that of the plain optimizer."""
        for i, (param, whole) in enumerate(zip(self.params, params_of(self.plain), strict=True)):
            local(param).copy_(self.laid.fragment(whole.detach(), i).view_as(local(param)))
            param.grad = None
            param.grad_dtype = param.dtype
        for own, plain in zip(self.wrapped.param_groups, self.plain.param_groups, strict=True):
            own["lr"] = plain["lr"]
        self.share()
        self.take()
        self.go(2)
        return self.different()


def ready(**options: Any) -> functools.partial[Any]:
    """For `run(after=...)`: two steps in one process, so that ranks need not capture what these did."""
    return functools.partial(steps_alone, **options)


def steps_alone(**options: Any) -> None:
    Trainer(ALONE, **options).go(2)
