"""Later: what begins at a step, at every few steps, below a learning rate, or at a rare gradient."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tests.harness.toy_optimizers import PerParameter, State, cube
from tests.harness.traps.trap import Params, Trap, halves, set_group

FAMILY = "later"

# -- coupling that begins late ---------------------------------------------------------------------


class LateCoupling(Optimizer):
    """Base of optimizers that divide by the norm of all gradients, sometimes."""

    def __init__(self, params: Params) -> None:
        super().__init__(halves(params), {"lr": 0.1, "coupled": False})
        self.count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += 1
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in params]).norm() if self.couples(params) else 1.0
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(cube(param.grad) / norm * group["lr"])

    def couples(self, params: Params) -> bool:
        raise NotImplementedError


class FromStepFive(LateCoupling):
    """From the fifth step on."""

    def couples(self, params: Params) -> bool:
        return self.count >= 5


class FromStepThirteen(LateCoupling):
    """From the thirteenth step on."""

    def couples(self, params: Params) -> bool:
        return self.count >= 13


class AtStepThirtyOne(LateCoupling):
    """At the thirty-first step alone, at which a rehearsal tries low hyperparameters."""

    def couples(self, params: Params) -> bool:
        return self.count == 31


class SlightlyAtStepTwentyTwo(Optimizer):
    """At the twenty-second step alone, by factors that leave next to nothing of the update."""

    def __init__(self, params: Params) -> None:
        super().__init__(halves(params), {"lr": 0.1})
        self.param_groups[1]["lr"] = 0.07
        self.count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += 1
        scale = max(group["lr"] for group in self.param_groups) ** 3 if self.count == 22 else 1.0
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(cube(param.grad) * (group["lr"] * scale))


class EverySeven(LateCoupling):
    """At every seventh step."""

    def couples(self, params: Params) -> bool:
        return self.count % 7 == 0


class BelowRate(LateCoupling):
    """Once the learning rate is low."""

    def couples(self, params: Params) -> bool:
        return bool(self.param_groups[0]["lr"] < 0.05)


class WhenAsked(LateCoupling):
    """Once a hyperparameter says so."""

    def couples(self, params: Params) -> bool:
        return bool(self.param_groups[0]["coupled"])


class AtLargeGradient(LateCoupling):
    """At a gradient that is much larger than usual."""

    def couples(self, params: Params) -> bool:
        return any(p.grad.norm().item() > 100 for p in params)


class AtZeroGradient(LateCoupling):
    """At a gradient of zeros."""

    def couples(self, params: Params) -> bool:
        return any(not p.grad.any() for p in params)


class LateRate(PerParameter):
    """From the fourth step on the largest learning rate counts for all."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        state["step"] = state.get("step", 0) + 1
        rate = group["lr"] if state["step"] < 4 else max(g["lr"] for g in self.param_groups)
        param.add_(cube(grad), alpha=-rate)


class LateLast(Optimizer):
    """From the fourth step on the last of a group takes half steps."""

    def __init__(self, params: Params) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                state["step"] = state.get("step", 0) + 1
                half = state["step"] > 3 and param is group["params"][-1]
                param.add_(cube(param.grad), alpha=-group["lr"] * (0.5 if half else 1.0))


class SkipAll(Optimizer):
    """Skips the whole step if one gradient is not finite."""

    def __init__(self, params: Params) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = [p for group in self.param_groups for p in group["params"]]
        if not all(bool(torch.isfinite(p.grad).all()) for p in params):
            return
        for param in params:
            param.sub_(cube(param.grad) * 0.1)


# -- what a parameter does alone -------------------------------------------------------------------


class SkipItself(PerParameter):
    """Leaves out a parameter whose gradient is not finite; the others go on."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        if torch.isfinite(grad).all():
            param.add_(cube(grad), alpha=-group["lr"])


class ClipItself(PerParameter):
    """Clips a rare large gradient by its own norm, asked for on the host."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        average = state.setdefault("average", torch.zeros_like(param))
        norm = grad.norm().item()
        average.lerp_(grad / norm if norm > 100 else grad, 0.1)
        param.add_(cube(average), alpha=-group["lr"])


class MatrixIfLarge(PerParameter):
    """Is elementwise until a large gradient comes."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        large = grad.abs() > 100
        param.sub_(torch.where(large.any(), cube(grad) / 1e9, grad) * group["lr"])


class Periodic(PerParameter):
    """Every `every` steps a factor is made anew."""

    def __init__(self, params: Params, every: int) -> None:
        super().__init__(params, every=every)

    def due(self, step: int, every: int) -> bool:
        return step % every == 0

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        if not state:
            state.update(step=0, factor=torch.eye(len(param)))
        state["step"] += 1
        if self.due(state["step"], group["every"]):
            state["factor"].lerp_(grad @ grad.T, 0.5)
        param.add_(state["factor"] @ grad, alpha=-group["lr"])


class Doubling(Periodic):
    """The factor is made at steps 1, 2, 4, 8, ..."""

    def due(self, step: int, every: int) -> bool:
        return step & (step - 1) == 0


class PeriodOfRate(Periodic):
    """The period follows from the learning rate."""

    def due(self, step: int, every: int) -> bool:
        return bool(step % max(1, round(0.3 / self.param_groups[0]["lr"])) == 0)


class Begins(PerParameter):
    """Is elementwise at first, and works on matrices from the fifth step on."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        if not state:
            state.update(step=0, average=torch.zeros_like(param))
        state["step"] += 1
        state["average"].lerp_(grad, 0.1)
        update = cube(state["average"]) if state["step"] >= 5 else state["average"]
        param.add_(update, alpha=-group["lr"])


class Ends(PerParameter):
    """Works on matrices while it is warm, and is elementwise once the learning rate is low."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        param.add_(cube(grad) if group["lr"] > 0.05 else grad, alpha=-group["lr"])


class LateState(PerParameter):
    """Gets its state at the fourth step."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        state["step"] = state.get("step", 0) + 1
        update = cube(grad)
        if state["step"] > 3:
            average = state.setdefault("average", torch.zeros_like(param))
            update = average.lerp_(update, 0.5)
        param.add_(update, alpha=-group["lr"])


# -- gradients -------------------------------------------------------------------------------------


def at(step: int, place: int, change: Callable[[Tensor], Tensor]) -> Callable[[Tensor, int, int], Tensor]:
    """One gradient at one step is another one."""

    def grads(grad: Tensor, i: int, now: int) -> Tensor:
        return change(grad) if (now, i) == (step, place) else grad

    return grads


def one_nan(grad: Tensor) -> Tensor:
    grad = grad.clone()
    grad[0, 0] = math.nan
    return grad


LARGE = at(4, 1, lambda grad: grad * 1000)
NAN = at(2, 1, one_nan)
ZERO = at(3, 0, torch.zeros_like)

TRAPS = (
    Trap("coupled-from-step-5", FAMILY, FromStepFive, "equal", steps=7),
    Trap("coupled-from-step-13", FAMILY, FromStepThirteen, "equal", steps=15),
    Trap("coupled-at-step-31", FAMILY, AtStepThirtyOne, "equal", steps=33),
    Trap("slightly-coupled-at-step-22", FAMILY, SlightlyAtStepTwentyTwo, "either", steps=24),
    Trap("coupled-every-7", FAMILY, EverySeven, "equal", steps=9),
    Trap("coupled-below-rate", FAMILY, BelowRate, "equal", steps=5, edit=set_group("lr", 0.01, at=3)),
    Trap("coupled-when-asked", FAMILY, WhenAsked, "equal", steps=5, edit=set_group("coupled", True, at=3)),
    Trap("coupled-at-large-gradient", FAMILY, AtLargeGradient, "equal", steps=6, grads=LARGE),
    Trap("coupled-at-zero-gradient", FAMILY, AtZeroGradient, "equal", steps=5, grads=ZERO),
    Trap("largest-rate-later", FAMILY, lambda p: LateRate(halves(p, {"lr": 0.1}, {"lr": 0.02})), "either", steps=6),
    Trap("last-of-group-later", FAMILY, LateLast, "either", steps=6),
    Trap("nan-skips-all", FAMILY, SkipAll, "either", grads=NAN),
    Trap("nan-skips-itself", FAMILY, SkipItself, "equal", grads=NAN),
    Trap("large-gradient-clipped", FAMILY, ClipItself, "equal", steps=6, grads=LARGE),
    Trap("large-gradient-needs-matrix", FAMILY, MatrixIfLarge, "equal", steps=6, grads=LARGE),
    Trap("every-7", FAMILY, lambda params: Periodic(params, 7), "equal", steps=15),
    Trap("every-13", FAMILY, lambda params: Periodic(params, 13), "equal", steps=27),
    Trap("every-37", FAMILY, lambda params: Periodic(params, 37), "equal", steps=39),
    Trap(
        "period-changed",
        FAMILY,
        lambda params: Periodic(params, 3),
        "equal",
        steps=9,
        edit=set_group("every", 2, at=4),
    ),
    Trap("period-doubles", FAMILY, lambda params: Doubling(params, 1), "equal", steps=10),
    Trap(
        "period-of-rate",
        FAMILY,
        lambda params: PeriodOfRate(params, 1),
        "either",
        steps=10,
        edit=set_group("lr", 0.15, at=4),
    ),
    Trap("matrix-from-step-5", FAMILY, Begins, "equal", steps=7),
    Trap("elementwise-below-rate", FAMILY, Ends, "equal", edit=set_group("lr", 0.01, at=2)),
    Trap("state-from-step-4", FAMILY, LateState, "equal", steps=6),
)
