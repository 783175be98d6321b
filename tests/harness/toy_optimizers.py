"""Small optimizers, each with one trait that wrapping has to live with: counters, host reads, coupling, ..."""

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


class TwoKinds(PerParameter):
    """Muon-like for groups with use_muon, Adam for the others: as many public Muons do it."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, lr=0.05, beta=0.9, beta2=0.99, eps=1e-8, use_muon=False)

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        if group["use_muon"]:
            if not state:
                state["momentum"] = torch.zeros_like(param)
            state["momentum"].lerp_(grad, 1 - group["beta"])
            update = grad.lerp(state["momentum"], group["beta"]).bfloat16()
            update = update / (update.norm() + 1e-7)
            param.add_(update + cube(update), alpha=-group["lr"])
            return
        if not state:
            state.update(step=0, mean=torch.zeros_like(param), square=torch.zeros_like(param))
        state["step"] += 1
        state["mean"].lerp_(grad, 1 - group["beta"])
        state["square"].mul_(group["beta2"]).addcmul_(grad, grad, value=1 - group["beta2"])
        first, second = 1 - group["beta"] ** state["step"], 1 - group["beta2"] ** state["step"]
        root = (state["square"] / second).sqrt().add_(group["eps"])
        param.addcdiv_(state["mean"], root, value=-group["lr"] / first)


class HostReading(PerParameter):
    """A value read on the host decides what happens: no tracer can follow."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        average = state.setdefault("average", torch.zeros_like(param))
        average.mul_(0.9).add_(grad)
        update = cube(average)
        if update.norm().item() > 10:
            update = update / update.norm()
        param.add_(update, alpha=-group["lr"])


class Choosy(PerParameter):
    """Raises errors of its own for what it does not take."""

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        if closure is not None:
            raise ValueError("closures are not supported")
        super().step()

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        if param.ndim != 2:
            raise TypeError(f"only matrices are supported, not {param.ndim} dims")
        param.add_(cube(grad), alpha=-group["lr"])


class GlobalNorm(PerParameter):
    """Scales every update by the norm of all gradients: parameters are coupled."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        params = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.square().sum() for p in params]).sum().sqrt()
        for param in params:
            param.sub_(param.grad / norm * self.defaults["lr"])


class GlobalNormOnHost(PerParameter):
    """The same, but read on the host, so that it can only be found by running it."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        params = [p for group in self.param_groups for p in group["params"]]
        norm = sum(p.grad.norm().item() for p in params)
        scale = 1 / norm if norm > 1 else 1.0
        for param in params:
            param.sub_(param.grad * scale * self.defaults["lr"])
