"""Small runs of an optimizer on a rank, wrapped, which the routes of checkpoints can save and load."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

import canzona_compile
from tests.harness.checkpointing import Holder
from tests.harness.layouts import Case, Laid, full, replicate_of
from tests.harness.optimizers import share_captures
from tests.harness.pairs import Shape

Make = Callable[[list[Any]], Optimizer]


def drawn(shapes: Sequence[Shape], step: int) -> list[Tensor]:
    """The gradients of a step; those of step -1 are the first values."""
    random = torch.Generator().manual_seed(100 + step)
    return [torch.randn(shape, generator=random) for shape in shapes]


def rate(step: int) -> float:
    """The learning rate of a step."""
    return 0.05 / (1 + step)


def never(_step: int, _place: int) -> bool:
    """No gradient is missing."""
    return False


class SmallRun:
    """A run on this rank. Those of one maker share what they rehearse and capture."""

    def __init__(
        self,
        make: Make,
        shapes: Sequence[Shape],
        case: Case,
        begun: bool = True,
        captures_anew: bool = False,
        **options: Any,
    ) -> None:
        """Make the optimizer and wrap it.

        Args:
            begun: whether parameters have their first values; a run that loads others begins elsewhere.
            captures_anew: do without what runs before this one rehearsed and captured.
            options: of `wrap`.
        """
        values, self.shapes = drawn(shapes, -1), shapes
        self.laid = Laid(values if begun else [torch.full_like(v, 0.25) for v in values], case)
        self.model = Holder(self.laid.params)
        self.optimizer: Any = make(list(self.laid.params))
        canzona_compile.wrap(self.optimizer, replicate=replicate_of(case), **options)
        if not captures_anew:
            share_captures(self.optimizer, maker=make)

    def steps(self, start: int, stop: int, missing: Callable[[int, int], bool] = never) -> None:
        """Take steps; `missing` tells by step and place which gradients are not there."""
        for step in range(start, stop):
            self.optimizer.param_groups[0]["lr"] = rate(step)
            for i, (param, grad) in enumerate(zip(self.laid.params, drawn(self.shapes, step), strict=True)):
                param.grad = None if missing(step, i) else self.laid.like_param(grad, i)
            self.optimizer.step()
        self.optimizer.zero_grad()

    def values(self) -> list[Tensor]:
        """The whole parameters."""
        return [full(param) for param in self.laid.params]
