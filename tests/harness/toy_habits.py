"""Habits of published optimizers, one each: where they count, what they keep, how they spell it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.harness.toy_optimizers import PerParameter, State, cube


class Columns(PerParameter):
    """Keeps eigenvectors as LAPACK returns them, in columns; strided products may round otherwise."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        if not state:
            state["basis"] = torch.linalg.eigh(grad.T @ grad).eigenvectors
        param.add_(grad @ state["basis"], alpha=-group["lr"])


class Optional(PerParameter):
    """A hyperparameter decides at the first step what there is in the state."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, averaged=True)

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        if not state:
            state["scale"] = torch.full_like(param, 0.5)
            if group["averaged"]:
                state["average"] = torch.zeros_like(param)
        update = cube(grad)
        if "average" in state:
            update = state["average"].lerp_(update, 0.1)
        param.add_(update * state["scale"], alpha=-group["lr"])


class Subtracting(PerParameter):
    """Scales inside of sub_, whose shape rule asks for the scale."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        param.sub_(cube(grad), alpha=group["lr"])


class Squaring(PerParameter):
    """Elementwise, with `square`."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        second = state.setdefault("second", torch.zeros_like(param))
        second.lerp_(grad.square(), 0.1)
        param.addcdiv_(grad, second.sqrt().add_(1e-8), value=-group["lr"])


class Debiasing(PerParameter):
    """Counts in the group from the first step on, and corrects with `math.pow`."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if "step" in group:
                group["step"] += 1
            else:
                group["step"] = 1
            correction = 1.0 - math.pow(0.9, group["step"])
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["average"] = torch.zeros_like(param)
                state["average"].lerp_(param.grad, 0.1)
                param.add_(cube(state["average"]), alpha=-group["lr"] / correction)


class DebiasingOnHost(Debiasing):
    """The same, and nobody can trace it."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        if any(p.grad is not None and p.grad.norm().item() < 0 for g in self.param_groups for p in g["params"]):
            raise AssertionError
        super().step()


class CountingInState(PerParameter):
    """Counts in the state under a key that is no parameter, as MADGRAD does."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        state: dict[Any, Any] = self.state
        count = state.setdefault("k", 0)
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.add_(cube(param.grad), alpha=-group["lr"] / (count + 1))
        state["k"] = count + 1


class AnyForeach(PerParameter):
    """`foreach` chooses another formula here, not another implementation."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, foreach=None)

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        scale = 0.5 if group["foreach"] is None else 0.7
        param.add_(cube(grad) * scale, alpha=-group["lr"])


class RootOfNorm(PerParameter):
    """Takes a root of a 0-d tensor."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        param.add_(grad / grad.square().sum().sqrt(), alpha=-group["lr"])


class FreshAverage(PerParameter):
    """Puts something in the state that later steps never read."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        state["norm"] = grad.norm()
        param.add_(cube(grad) / state["norm"], alpha=-group["lr"])


class Delegating(PerParameter):
    """Stands for another optimizer."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    @property
    def param_groups(self) -> Any:
        return self.inner.param_groups


class NewData(PerParameter):
    """An elementwise step that assigns to `.data`, of the parameter or of its state."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: Any) -> None:
        if group["of"] == "param":
            param.data = param.data - group["lr"] * grad
            return
        if not state:
            state["mean"] = torch.zeros_like(param)
        state["mean"].data = 0.9 * state["mean"].data + grad
        param.sub_(state["mean"], alpha=group["lr"])
