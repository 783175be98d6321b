"""A model under zero1 whose ranks go astray, as a driver of mistakes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.data_parallel.models import CHEAP, MAKERS, Model, batch, different
from tests.data_parallel.runs import set_up
from tests.harness.mistakes import attempt


class Trainee:
    """A model under zero1 with two optimizers, and plain ones that take the same gradients."""

    optimizers: Any
    handle: Any

    def __init__(self, make: str = "sgd", **options: Any) -> None:
        self.rank, self.make, self.options = dist.get_rank(), make, options
        self.model: Any = Model()
        self.plain = Model()
        self.expected = {**MAKERS, **CHEAP}[make](self.plain)

    def course(self) -> Iterator[str]:
        """A good step, and one that is expected to fail."""
        yield "built"
        self.model, self.optimizers, self.handle = set_up(self.model, self.make, **self.options)
        yield "bound"
        self.whole_step(0)
        self.plain_step(0)
        self.handle.synchronize()
        yield "trained"
        self.backward(1)
        yield "backward"
        self.step()
        self.zero()
        self.handle.synchronize()

    def tensors(self) -> dict[str, Tensor]:
        """Nothing: parameters are compared when ranks go on, as to read them is a collective."""
        return {}

    def whole_step(self, step: int) -> None:
        self.backward(step)
        self.step()
        self.zero()

    def plain_step(self, step: int) -> None:
        """What a whole step is without zero1: the mean of the gradients of two ranks, and the optimizers."""
        for rank in (0, 1):
            (0.5 * self.plain(batch(step, rank))).backward()
        for optimizer in self.expected:
            optimizer.step()
            optimizer.zero_grad()

    def backward(self, step: int) -> None:
        self.model(batch(step, self.rank)).backward()

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def go_on(self) -> list[str]:
        """Set right the rates, and train: errors, and parameters that differ.

        From those of the first rank, or from what plain optimizers make of all steps but the one that went wrong.
        """
        said: list[str] = []
        for own, plain in zip(self.optimizers, self.expected, strict=True):
            own.param_groups[0]["lr"] = plain.param_groups[0]["lr"]
        self.zero()
        for step in (3, 4):
            self.plain_step(step)
            said += errors("going on", lambda: (self.whole_step(step), self.handle.synchronize()))  # noqa: B023
            self.zero()
        said += errors("end", self.handle.synchronize)
        values = [p.detach().clone() for p in self.model.parameters()]
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, values, group=dist.new_group(backend="gloo"))
        pairs = zip(self.model.named_parameters(), found[0], values, strict=True)
        said += [f"apart: {name}" for (name, _), one, two in pairs if not torch.equal(one, two)]
        return said + [f"wrong: {name}" for name in different(self.model, self.plain)]


def errors(when: str, call: Callable[[], object]) -> list[str]:
    """The error of a call, with the name of its step; nothing if there is none."""
    found = attempt(call)
    return [f"{when}: {found.error}: {found.said}"] if found.error else []
