"""No gradient, and frozen parameters: what goes on without a gradient, and who asks for `requires_grad`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tests.harness.toy_optimizers import Cubic, PerParameter, State, cube
from tests.harness.traps.trap import Params, Trap

FAMILY = "no gradient"


class GoingOn(Optimizer):
    """Base of optimizers that do something to every parameter, with a gradient or without."""

    def __init__(self, params: Params) -> None:
        super().__init__(params, {"lr": 0.1, "decay": 0.5})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                self.update(param, param.grad, group, self.state[param])

    def update(self, param: Tensor, grad: Tensor | None, group: dict[str, Any], state: State) -> None:
        raise NotImplementedError


class Decaying(GoingOn):
    """Weight decay goes on."""

    def update(self, param: Tensor, grad: Tensor | None, group: dict[str, Any], state: State) -> None:
        param.mul_(1 - group["lr"] * group["decay"])
        if grad is not None:
            param.add_(cube(grad), alpha=-group["lr"])


class DecayingElementwise(GoingOn):
    """The same without a matrix product."""

    def update(self, param: Tensor, grad: Tensor | None, group: dict[str, Any], state: State) -> None:
        param.mul_(1 - group["lr"] * group["decay"])
        if grad is not None:
            param.add_(grad, alpha=-group["lr"])


class DecayingOnHost(GoingOn):
    """The same, and nobody can trace it."""

    def update(self, param: Tensor, grad: Tensor | None, group: dict[str, Any], state: State) -> None:
        if param.norm().item() > 0:
            param.mul_(1 - group["lr"] * group["decay"])
        if grad is not None:
            param.add_(cube(grad), alpha=-group["lr"])


class Rolling(GoingOn):
    """Momentum goes on."""

    def update(self, param: Tensor, grad: Tensor | None, group: dict[str, Any], state: State) -> None:
        average = state.setdefault("average", torch.zeros_like(param))
        average.mul_(0.7)
        if grad is not None:
            average.add_(grad)
        param.add_(cube(average), alpha=-group["lr"] * 0.1)


class Ticking(GoingOn):
    """The count goes on."""

    def update(self, param: Tensor, grad: Tensor | None, group: dict[str, Any], state: State) -> None:
        state["step"] = state.get("step", 0) + 1
        if grad is not None:
            param.add_(cube(grad), alpha=-group["lr"] / state["step"])


class Averaging(GoingOn):
    """The average of the parameter goes on."""

    def update(self, param: Tensor, grad: Tensor | None, group: dict[str, Any], state: State) -> None:
        if grad is not None:
            param.add_(cube(grad), alpha=-group["lr"])
        state.setdefault("ema", param.clone()).lerp_(param, 0.3)


class Forgetting(GoingOn):
    """A missing gradient clears the state."""

    def update(self, param: Tensor, grad: Tensor | None, group: dict[str, Any], state: State) -> None:
        if grad is None:
            state.clear()
            return
        average = state.setdefault("average", torch.zeros_like(param))
        param.add_(cube(average.lerp_(grad, 0.3)), alpha=-group["lr"])


class Repeating(GoingOn):
    """A missing gradient is the last one once more."""

    def update(self, param: Tensor, grad: Tensor | None, group: dict[str, Any], state: State) -> None:
        if grad is not None:
            state["last"] = grad.clone()
        if "last" in state:
            param.add_(cube(state["last"]), alpha=-group["lr"])


class Thawed(GoingOn):
    """Frozen parameters decay, others learn: it asks for `requires_grad`."""

    def update(self, param: Tensor, grad: Tensor | None, group: dict[str, Any], state: State) -> None:
        if not param.requires_grad:
            param.mul_(0.9)
        elif grad is not None:
            param.add_(cube(grad), alpha=-group["lr"])


class LearnsIfThawed(PerParameter):
    """A gradient counts only where the parameter requires one."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        if param.requires_grad:
            param.add_(cube(grad), alpha=-group["lr"])


class LearnsIfThawedElementwise(PerParameter):
    """The same without a matrix product."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        if param.requires_grad:
            param.add_(grad, alpha=-group["lr"])


class Together(Optimizer):
    """Base of optimizers to which missing gradients of others matter."""

    def __init__(self, params: Params) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            scale = self.scale(group["params"])
            for param in group["params"]:
                if param.grad is not None:
                    param.add_(cube(param.grad), alpha=-group["lr"] * scale)

    def scale(self, params: Params) -> float:
        raise NotImplementedError


class CountOfGradients(Together):
    """Divides by how many gradients there are."""

    def scale(self, params: Params) -> float:
        return 1.0 / max(1, sum(p.grad is not None for p in params))


class AllOrNothing(Together):
    """One missing gradient stops all."""

    def scale(self, params: Params) -> float:
        return float(all(p.grad is not None for p in params))


class FirstWithGradient(Optimizer):
    """The first parameter with a gradient takes double steps."""

    def __init__(self, params: Params) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            found = [p for p in group["params"] if p.grad is not None]
            for i, param in enumerate(found):
                param.add_(cube(param.grad), alpha=-group["lr"] * (2.0 if i == 0 else 1.0))


class RateDecaysIfUsed(Optimizer):
    """The learning rate decays at steps with gradients."""

    def __init__(self, params: Params) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if any(p.grad is not None for p in group["params"]):
                group["lr"] *= 0.5
            for param in group["params"]:
                if param.grad is not None:
                    param.add_(cube(param.grad), alpha=-group["lr"])


class StepCounted(Optimizer):
    """Counts steps on itself, also those without any gradient."""

    steps = 0

    def __init__(self, params: Params) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.add_(cube(param.grad), alpha=-group["lr"] / self.steps)


class MomentumAsUsual(PerParameter):
    """Leaves parameters without gradients alone, as torch does."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        average = state.setdefault("average", torch.zeros_like(param))
        state["step"] = state.get("step", 0) + 1
        param.add_(cube(average.lerp_(grad, 0.3)), alpha=-group["lr"] / state["step"])


# -- which gradients are missing -------------------------------------------------------------------


def missing_at_odd_steps(grad: Tensor, place: int, step: int) -> Tensor | None:
    return None if place == 1 and step % 2 == 1 else grad


def never_of_first(grad: Tensor, place: int, step: int) -> Tensor | None:
    return None if place == 0 else grad


def late_of_last(grad: Tensor, place: int, step: int) -> Tensor | None:
    return None if place == 3 and step < 2 else grad


def none_at_second(grad: Tensor, place: int, step: int) -> Tensor | None:
    return None if step == 1 else grad


def zero_at_second(grad: Tensor, place: int, step: int) -> Tensor | None:
    return torch.zeros_like(grad) if step == 1 else grad


def freeze_one(params: Params) -> None:
    params[1].requires_grad_(False)


def freeze(optimizer: Any, params: Params, step: int) -> None:
    if step == 2:
        params[1].requires_grad_(False)


def freeze_for_a_step(optimizer: Any, params: Params, step: int) -> None:
    """Freeze as users do: without a gradient as well."""
    params[1].requires_grad_(step != 2)
    if step == 2:
        params[1].grad = None


ODD = missing_at_odd_steps

TRAPS = (
    Trap("decay-without-gradient", FAMILY, Decaying, "either", grads=ODD),
    Trap("decay-without-gradient-ever", FAMILY, Decaying, "either", grads=never_of_first),
    Trap("decay-without-gradient-elementwise", FAMILY, DecayingElementwise, "either", grads=ODD),
    Trap("decay-without-gradient-on-host", FAMILY, DecayingOnHost, "either", grads=ODD),
    Trap("decay-without-any-gradient", FAMILY, Decaying, "either", grads=none_at_second),
    Trap("momentum-without-gradient", FAMILY, Rolling, "either", grads=ODD),
    Trap("count-without-gradient", FAMILY, Ticking, "either", grads=ODD),
    Trap("count-until-first-gradient", FAMILY, Ticking, "either", grads=late_of_last),
    Trap("average-without-gradient", FAMILY, Averaging, "either", grads=ODD),
    Trap("forgets-without-gradient", FAMILY, Forgetting, "either", grads=ODD),
    Trap("repeats-without-gradient", FAMILY, Repeating, "either", grads=ODD),
    Trap("going-on-with-all-gradients", FAMILY, Decaying, "either"),
    Trap("frozen-decays", FAMILY, Thawed, "either", prepare=freeze_one),
    Trap("frozen-later-decays", FAMILY, Thawed, "either", edit=freeze),
    Trap("frozen-does-not-learn", FAMILY, LearnsIfThawed, "either", prepare=freeze_one),
    Trap("frozen-later-does-not-learn", FAMILY, LearnsIfThawed, "either", edit=freeze),
    Trap("frozen-later-elementwise", FAMILY, LearnsIfThawedElementwise, "either", edit=freeze),
    Trap("frozen-for-a-step", FAMILY, MomentumAsUsual, "equal", edit=freeze_for_a_step),
    Trap("count-of-gradients", FAMILY, CountOfGradients, "either", grads=ODD),
    Trap("all-or-nothing", FAMILY, AllOrNothing, "either", grads=ODD),
    Trap("first-with-gradient", FAMILY, FirstWithGradient, "either", grads=never_of_first),
    Trap("rate-decays-if-used", FAMILY, RateDecaysIfUsed, "either", grads=none_at_second),
    Trap("count-of-steps-without-gradients", FAMILY, StepCounted, "either", grads=none_at_second),
    Trap("gradient-missing-now-and-then", FAMILY, MomentumAsUsual, "equal", grads=ODD),
    Trap("gradient-never-there", FAMILY, MomentumAsUsual, "equal", grads=never_of_first),
    Trap("gradient-there-later", FAMILY, MomentumAsUsual, "equal", grads=late_of_last),
    Trap("gradients-all-missing-once", FAMILY, MomentumAsUsual, "equal", grads=none_at_second),
    Trap("gradients-all-zero-once", FAMILY, Cubic, "equal", grads=zero_at_second),
)
