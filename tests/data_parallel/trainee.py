"""A model under zero1 whose ranks go astray, as a driver of mistakes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.data_parallel.models import ALL_MAKERS, Model, different
from tests.data_parallel.runs import set_up
from tests.harness.mistakes import attempt
from tests.harness.model_pairs import ModelPair, update


class Trainee(ModelPair):
    """A model under zero1 with two optimizers, and plain ones that take the same gradients."""

    def __init__(self, make: str = "sgd", **options: Any) -> None:
        self.rank, self.make, self.options = dist.get_rank(), make, options
        plain = Model()
        super().__init__(Model(), [], plain, ALL_MAKERS[make](plain))

    def course(self) -> Iterator[str]:
        """A good step, and one that is expected to fail."""
        yield "built"
        self.model, self.optimizers, _ = set_up(self.model, self.make, **self.options)
        yield "bound"
        self.train(0)
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
        update(self.optimizers)

    def plain_step(self, step: int) -> None:
        """What a whole step is without zero1."""
        self.plain_backward(step)
        update(self.expected)

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
