"""What the small optimizers of `toys` and of traps are made from, and one that others are made from."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

State = dict[str, Any]


class PerParameter(Optimizer):
    """Base of optimizers that update one parameter after another."""

    def __init__(self, params: Iterable[Any], lr: float = 0.1, **hypers: Any) -> None:
        super().__init__(params, {"lr": lr, **hypers})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.update(param, param.grad, group, self.state[param])

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        raise NotImplementedError


def cube(grad: Tensor) -> Tensor:
    """Something that needs the whole matrix."""
    return grad @ grad.T @ grad


class HostReading(PerParameter):
    """A value read on the host decides what happens: no tracer can follow."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        average = state.setdefault("average", torch.zeros_like(param))
        average.mul_(0.9).add_(grad)
        update = cube(average)
        if update.norm().item() > 10:
            update = update / update.norm()
        param.add_(update, alpha=-group["lr"])
