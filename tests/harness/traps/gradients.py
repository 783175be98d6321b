"""Gradients that the step writes, replaces, clears or finds elsewhere."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tests.harness.toy_optimizers import Cubic, PerParameter, State, cube
from tests.harness.traps.trap import Feed, Params, Trap

FAMILY = "gradients"


class DecayInGradient(PerParameter):
    """Adds weight decay to the gradient, in place."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        grad.add_(param, alpha=0.1)
        param.add_(cube(grad), alpha=-group["lr"])


class DecayInGradientElementwise(PerParameter):
    """The same without a matrix product."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        grad.add_(param, alpha=0.1)
        param.add_(grad, alpha=-group["lr"])


class DecayInGradientOnHost(PerParameter):
    """The same, and nobody can trace it."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        if grad.norm().item() > 0:
            grad.add_(param, alpha=0.1)
        param.add_(cube(grad), alpha=-group["lr"])


class DecayInData(PerParameter):
    """Adds weight decay to `grad.data`."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        grad.data.add_(param.data, alpha=0.1)
        param.data.add_(cube(grad), alpha=-group["lr"])


class Halving(PerParameter):
    """Halves the gradient in place, so that the rest stays for the next step."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        param.add_(cube(grad), alpha=-group["lr"])
        grad.mul_(0.5)


class Zeroing(PerParameter):
    """Clears the gradient once it is used."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        param.add_(cube(grad), alpha=-group["lr"])
        grad.zero_()


class ZeroingElementwise(PerParameter):
    """The same without a matrix product."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        param.add_(grad, alpha=-group["lr"])
        grad.zero_()


class Clamping(PerParameter):
    """Clamps the gradient in place."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        grad.clamp_(-0.5, 0.5)
        param.add_(cube(grad), alpha=-group["lr"])


class ReplacingGradient(PerParameter):
    """Puts another tensor into `param.grad`."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        param.grad = cube(grad)
        param.add_(param.grad, alpha=-group["lr"])


class DroppingGradient(PerParameter):
    """Sets `param.grad` to None."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        param.add_(cube(grad), alpha=-group["lr"])
        param.grad = None


class TwoLoops(Optimizer):
    """The first loop writes gradients, the second one reads them."""

    def __init__(self, params: Params) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = [p for group in self.param_groups for p in group["params"]]
        for param in params:
            param.grad.div_(param.grad.norm() + 1e-3)
        for param in params:
            param.add_(cube(param.grad), alpha=-self.param_groups[0]["lr"])


class Foreach(Optimizer):
    """Writes all gradients with one `foreach` operator."""

    def __init__(self, params: Params) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            grads = [p.grad for p in group["params"]]
            torch._foreach_mul_(grads, 0.5)
            torch._foreach_add_(group["params"], grads, alpha=-group["lr"])


class Swapped(Optimizer):
    """Every parameter takes the gradient of another one of its shape."""

    def __init__(self, params: Params) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            first, other = group["params"][0], group["params"][2]
            first.grad, other.grad = other.grad, first.grad
            for param in group["params"]:
                param.add_(cube(param.grad), alpha=-group["lr"])


class ClearingAll(PerParameter):
    """Calls `zero_grad` at the end of its step."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.zero_grad()

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        param.add_(cube(grad), alpha=-group["lr"])


class MainGradient(PerParameter):
    """Takes `main_grad` if there is one, as Megatron has it."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        param.add_(cube(getattr(param, "main_grad", grad)), alpha=-group["lr"])


class WeighedGradient(PerParameter):
    """The gradient has an attribute."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        param.add_(cube(grad), alpha=-group["lr"] * getattr(grad, "weight", 1.0))


class PreviousOnParameter(PerParameter):
    """Keeps the last gradient as an attribute of the parameter."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        holder: Any = param
        previous = getattr(param, "previous", None)
        update = cube(grad) if previous is None else cube(grad - previous)
        holder.previous = grad.clone()
        param.add_(update, alpha=-group["lr"])


class TwoInOne(PerParameter):
    """Reads `param.grad` again after it has written what it was given."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        grad.sign_()
        assert param.grad is not None
        param.add_(cube(param.grad), alpha=-group["lr"])


def give_main_gradients(optimizer: Any, params: Params, step: int) -> None:
    for param in params:
        param.main_grad = param.grad * 2


def give_main_gradients_later(optimizer: Any, params: Params, step: int) -> None:
    if step >= 2:
        give_main_gradients(optimizer, params, step)


def weigh_gradients(optimizer: Any, params: Params, step: int) -> None:
    for i, param in enumerate(params):
        param.grad.weight = 1.0 + i + step


def scale_gradients(optimizer: Any, params: Params, step: int) -> None:
    for param in params:
        param.grad.mul_(0.25)


def step_twice(optimizer: Any, feed: Feed, step: int) -> None:
    """The second step finds what the first one left."""
    optimizer.step()
    optimizer.step()


TRAPS = (
    Trap("decay-in-gradient", FAMILY, DecayInGradient, "either", compares_grads=True),
    Trap("decay-in-gradient-elementwise", FAMILY, DecayInGradientElementwise, "either", compares_grads=True),
    Trap("decay-in-gradient-on-host", FAMILY, DecayInGradientOnHost, "either", compares_grads=True),
    Trap("decay-in-gradient-data", FAMILY, DecayInData, "either", compares_grads=True),
    Trap("decay-in-gradient-accumulated", FAMILY, DecayInGradient, "either", accumulates=True),
    Trap("gradient-halved", FAMILY, Halving, "either", accumulates=True),
    Trap("gradient-zeroed", FAMILY, Zeroing, "either", accumulates=True),
    Trap("gradient-zeroed-elementwise", FAMILY, ZeroingElementwise, "either", accumulates=True),
    Trap("gradient-clamped", FAMILY, Clamping, "either", compares_grads=True),
    Trap("gradient-replaced", FAMILY, ReplacingGradient, "either", compares_grads=True),
    Trap("gradient-dropped", FAMILY, DroppingGradient, "either", compares_grads=True),
    Trap("gradient-normalized-first", FAMILY, TwoLoops, "either", compares_grads=True),
    Trap("gradient-by-foreach", FAMILY, Foreach, "either", compares_grads=True),
    Trap("gradients-swapped", FAMILY, Swapped, "refused"),
    Trap("gradients-cleared-by-step", FAMILY, ClearingAll, "either", compares_grads=True),
    Trap("gradients-cleared-by-step-accumulated", FAMILY, ClearingAll, "either", accumulates=True),
    Trap("gradient-read-again", FAMILY, TwoInOne, "either", compares_grads=True),
    Trap("main-gradient", FAMILY, MainGradient, "either", ("main_grad",), edit=give_main_gradients),
    Trap("main-gradient-later", FAMILY, MainGradient, "either", ("main_grad",), edit=give_main_gradients_later),
    Trap("gradient-with-attribute", FAMILY, WeighedGradient, "either", ("weight",), edit=weigh_gradients),
    Trap("previous-gradient-on-parameter", FAMILY, PreviousOnParameter, "either", ("previous",)),
    Trap("gradient-scaled-by-user", FAMILY, Cubic, "equal", edit=scale_gradients),
    Trap("same-gradient-twice", FAMILY, Cubic, "equal", call=step_twice),
)
