"""A model on ranks beside a plain one: forward, backward and steps of both, and equal bits."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

import canzona_compile
from tests.data_parallel.models import batch
from tests.harness.layouts import mesh_of
from tests.harness.optimizers import shared_captures
from tests.harness.pairs import different

Loss = Callable[[Any, int, int], Tensor]  # of a model, by step and rank


def loss_of(model: Any, step: int, rank: int) -> Tensor:
    """The loss of a small language model."""
    loss: Tensor = model(batch(step, rank))
    return loss


def rank_here() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def update(optimizers: Iterable[Optimizer]) -> None:
    """Step all, and drop gradients."""
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def train(model: Any, optimizers: Iterable[Optimizer], steps: int = 1, loss: Loss = loss_of) -> None:
    """Train on this rank, or in one process."""
    for step in range(steps):
        loss(model, step, rank_here()).backward()
        update(optimizers)


def train_alone(model: Any, optimizers: Iterable[Optimizer], loss: Loss = loss_of, /, **options: Any) -> None:
    """Wrap optimizers and train in one process. Ranks that are forked from it capture nothing again."""
    with shared_captures():
        for optimizer in optimizers:
            canzona_compile.wrap(optimizer, **options)
    train(model, optimizers, 2, loss)


def zero1(model: Any, optimizers: Any, **options: Any) -> Any:
    """The optimizers under zero1 over all ranks, which share what others have captured."""
    with shared_captures():
        return canzona_compile.zero1(
            model, optimizers, **{"mesh": mesh_of((dist.get_world_size(),), ("dp",)), **options}
        )


@dataclass
class ModelPair:
    """A model whose ranks share its optimizers, and the same one with plain optimizers of all ranks' gradients.

    Attributes:
        optimizers: those of the model.
        expected: the plain ones.
        loss: of either.
    """

    model: Any
    optimizers: Sequence[Any]
    plain: Any
    expected: Sequence[Any]
    loss: Loss = loss_of

    @property
    def handle(self) -> Any:
        return self.optimizers[0].canzona

    def plain_backward(self, step: int) -> None:
        """Give the plain model the mean of the gradients of all ranks."""
        world = dist.get_world_size()
        for rank in range(world):
            (self.loss(self.plain, step, rank) / world).backward()

    def backward(self, step: int) -> None:
        """Give the model the gradients of this rank."""
        self.loss(self.model, step, rank_here()).backward()

    def both_backward(self, step: int) -> None:
        self.backward(step)
        self.plain_backward(step)

    def update(self) -> None:
        update((*self.optimizers, *self.expected))

    def train(self, *steps: int) -> None:
        for step in steps:
            self.both_backward(step)
            self.update()

    def different(self) -> list[str]:
        """What of parameters and states is not that of the plain optimizers. This is a collective."""
        for own in self.optimizers:
            if hasattr(own.canzona, "synchronize"):
                own.canzona.synchronize()
        pairs = enumerate(zip(self.expected, self.optimizers, strict=True))
        return [f"optimizer {i}: {what}" for i, (one, two) in pairs for what in different(one, two)]


class Given(ModelPair):
    """The plain model takes the gradients that ranks have reduced."""

    def plain_backward(self, step: int) -> None:
        for whole, param in zip(self.plain.parameters(), self.model.parameters(), strict=True):
            whole.grad = param.grad.full_tensor() if hasattr(param.grad, "full_tensor") else param.grad.clone()


def under_zero1(
    model: Any, make: Callable[[Any], Any], loss: Loss = loss_of, plain: Any = None, **options: Any
) -> ModelPair:
    """A model under zero1, beside a copy of it."""
    plain = copy.deepcopy(model) if plain is None else plain
    expected, found = make(plain), zero1(model, make(model), **options)
    as_list = isinstance(found, list)  # a chain is one
    return ModelPair(model, found if as_list else [found], plain, expected if as_list else [expected], loss)
