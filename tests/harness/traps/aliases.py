"""State that is no memory of its own: the gradient itself, the parameter itself, or a part of other state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.harness.toy_optimizers import PerParameter, State, cube
from tests.harness.traps.trap import Params, Trap

FAMILY = "aliases"


class FirstGradientAsMomentum(PerParameter):
    """Takes the first gradient for its momentum, and no copy of it."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        if not state:
            state["momentum"] = grad
        else:
            state["momentum"].mul_(0.9).add_(grad)
        param.add_(self.direction(state["momentum"]), alpha=-group["lr"])

    def direction(self, momentum: Tensor) -> Tensor:
        """Make the update of the momentum."""
        return cube(momentum)


class FirstGradientAsMomentumElementwise(FirstGradientAsMomentum):
    """The same without a matrix product."""

    def direction(self, momentum: Tensor) -> Tensor:
        """Make the update of the momentum."""
        return momentum


class LastGradient(PerParameter):
    """Keeps the last gradient, and no copy of it."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        change = grad - state["last"] if state else grad
        param.add_(cube(change) + change, alpha=-group["lr"])
        state["last"] = grad


class LastGradientElementwise(PerParameter):
    """The same without a matrix product."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        change = grad - state["last"] if state else grad
        param.add_(change, alpha=-group["lr"])
        state["last"] = grad


class GradientPassedOn(PerParameter):
    """Puts the gradient into its state and reads it there in the same step, as code in two halves does."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        state["grad"] = grad
        param.add_(cube(state["grad"]), alpha=-group["lr"])


class ParameterInState(PerParameter):
    """Keeps the parameter's own memory and takes it for what the parameter was before."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        if not state:
            state["slow"] = param.data
        param.add_(cube(grad), alpha=-group["lr"])
        param.sub_(state["slow"] * 0.1)


class RowOfAverage(PerParameter):
    """Keeps a row of other state under a name of its own."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        if not state:
            state["average"] = torch.zeros_like(param)
            state["row"] = state["average"][0]
        state["average"].lerp_(grad, 0.1)
        param.add_(cube(grad) + state["row"], alpha=-group["lr"])


class GradientsOnItself(PerParameter):
    """Collects all gradients in an attribute before it uses them, as some do for `foreach`."""

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        self.collected: list[Any] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        pairs = [(p, group["lr"]) for group in self.param_groups for p in group["params"] if p.grad is not None]
        self.collected = [param.grad for param, _ in pairs]
        for (param, lr), grad in zip(pairs, self.collected, strict=True):
            param.add_(cube(grad), alpha=-lr)


class WrittenInPlace:
    """Moves gradients into the memory of those of a step, before each step after it.

    Args:
        since: the step.
    """

    def __init__(self, since: int = 0) -> None:
        self.since, self.homes = since, list[Any]()

    def __call__(self, optimizer: Any, params: Params, step: int) -> None:
        """Do it."""
        if step == self.since:
            self.homes = [param.grad for param in params]
        if step <= self.since:
            return
        for param, home in zip(params, self.homes, strict=True):
            home.copy_(param.grad)
            param.grad = home


class WrittenInPlaceAtNewPlan(WrittenInPlace):
    """Does so first at a step for which there has to be a new plan."""

    def __call__(self, optimizer: Any, params: Params, step: int) -> None:
        """Do it."""
        super().__call__(optimizer, params, step)
        if step == self.since + 1:
            params[0].lr_mul = 1.0


TRAPS = [
    Trap("first-gradient-as-momentum-elementwise", FAMILY, FirstGradientAsMomentumElementwise, "equal"),
    Trap("first-gradient-as-momentum", FAMILY, FirstGradientAsMomentum, "equal"),
    Trap(
        "last-gradient-in-place",
        FAMILY,
        LastGradient,
        "refused",
        ("written over an earlier gradient", "self.state[param]['last']", "zero_grad"),
        edit=WrittenInPlace(),
    ),
    Trap("last-gradient", FAMILY, LastGradient, "equal"),
    Trap("last-gradient-elementwise", FAMILY, LastGradientElementwise, "equal"),
    Trap("last-gradient-elementwise-in-place", FAMILY, LastGradientElementwise, "equal", edit=WrittenInPlace()),
    Trap(
        "first-gradient-in-place",
        FAMILY,
        FirstGradientAsMomentum,
        "refused",
        ("written over an earlier gradient",),
        edit=WrittenInPlace(),
    ),
    Trap("gradient-passed-on-in-place", FAMILY, GradientPassedOn, "equal", edit=WrittenInPlace()),
    Trap(
        "last-gradient-in-place-at-new-plan",
        FAMILY,
        LastGradient,
        "refused",
        ("written over an earlier gradient",),
        edit=WrittenInPlaceAtNewPlan(since=1),
    ),
    Trap("gradients-on-itself-in-place", FAMILY, GradientsOnItself, "equal", edit=WrittenInPlace()),
    Trap("parameter-in-state", FAMILY, ParameterInState, "either"),
    Trap("row-of-average", FAMILY, RowOfAverage, "equal"),
]
