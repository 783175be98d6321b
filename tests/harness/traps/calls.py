"""The call: what `step` returns, what it is given, when closures run, and what else the user calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tests.harness.toy_optimizers import Cubic, PerParameter, State, cube
from tests.harness.traps.trap import DDP, PLAIN, Feed, Params, Trap

FAMILY = "the call"


class Calling(Optimizer):
    """Base of optimizers with a call of their own."""

    def __init__(self, params: Params) -> None:
        super().__init__(params, {"lr": 0.1})

    def take(self, scale: Any = 1.0) -> None:
        with torch.no_grad():
            for group in self.param_groups:
                for param in group["params"]:
                    if param.grad is not None:
                        param.sub_(cube(param.grad) * (group["lr"] * scale))


# -- what it returns -------------------------------------------------------------------------------


class ReturnsNumber(Calling):
    """Returns a number."""

    def step(self, closure: Any = None) -> Any:
        self.take()
        return len(self.param_groups) + self.param_groups[0]["lr"]


class ReturnsNumberElementwise(Calling):
    """The same without a matrix product."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for param in self.param_groups[0]["params"]:
            param.sub_(param.grad * self.param_groups[0]["lr"])
        return self.param_groups[0]["lr"]


class ReturnsItself(Calling):
    """Returns itself, for chains of calls."""

    def step(self, closure: Any = None) -> Any:
        self.take()
        return self


class ReturnsNorm(Calling):
    """Returns the largest gradient, which it does not use."""

    def step(self, closure: Any = None) -> Any:
        self.take()
        return torch.stack([p.grad.abs().max() for p in self.param_groups[0]["params"]]).max()


class ReturnsDict(Calling):
    """Returns a dict for a log."""

    def step(self, closure: Any = None) -> Any:
        self.take()
        return {"lr": self.param_groups[0]["lr"], "updated": True}


class ReturnsLoss(PerParameter):
    """Returns what the closure returned, as torch's optimizers do."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        super().step()
        return loss

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        param.add_(cube(grad), alpha=-group["lr"])


# -- closures --------------------------------------------------------------------------------------


class ClosureLate(Calling):
    """Updates with the gradients it finds, and evaluates the closure afterwards, for the next step."""

    def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
        self.take()
        return closure()


class ClosureTwice(Calling):
    """Evaluates the closure, moves, and evaluates it again, as sharpness-aware methods do."""

    def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
        closure()
        self.take(0.1)
        loss = closure()
        self.take()
        return loss


class ClosureBetween(Calling):
    """Evaluates the closure once half of the parameters are updated."""

    def step(self, closure: Callable[[], Any]) -> None:  # type: ignore[override]
        params = self.param_groups[0]["params"]
        middle = len(params) // 2
        with torch.no_grad():
            for param in params[:middle]:
                param.sub_(cube(param.grad) * 0.1)
            closure()
            for param in params[middle:]:
                param.sub_(cube(param.grad) * 0.1)


class LossScales(Calling):
    """The loss scales the step, as Polyak's rule has it."""

    def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
        loss = closure()
        self.take(float(loss))
        return loss


class LossDecides(Calling):
    """No step if the loss is low."""

    def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
        loss = closure()
        if float(loss) > 2.4:
            self.take()
        return loss


# -- arguments and other methods -------------------------------------------------------------------


class TakesRate(Calling):
    """`step` takes a learning rate."""

    def step(self, closure: Any = None, lr: float = 0.1) -> None:  # type: ignore[override]
        self.take(lr * 10)


class TakesGradients(Calling):
    """`step` takes gradients, as apex has it."""

    @torch.no_grad()
    def step(self, closure: Any = None, grads: Any = None) -> None:  # type: ignore[override]
        params = self.param_groups[0]["params"]
        for param, grad in zip(params, grads, strict=True):
            param.sub_(cube(grad) * 0.1)


class TakesNumberFirst(Calling):
    """The first argument of `step` is no closure."""

    def step(self, scale: float = 1.0) -> None:  # type: ignore[override]
        self.take(scale)


class TakesAnything(Calling):
    """`step` takes whatever is passed on to it."""

    def step(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        self.take(kwargs.get("scale", 1.0))


class TwoSteps(Calling):
    """Has a second method that updates parameters."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.take()

    def second_step(self) -> None:
        self.take(0.5)


class AveragesToSee(PerParameter):
    """The user swaps parameters with their averages to validate, and back."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        param.add_(cube(grad), alpha=-group["lr"])
        state.setdefault("ema", param.clone()).lerp_(param, 0.3)

    @torch.no_grad()
    def swap(self) -> None:
        for param, state in self.state.items():
            kept = param.clone()
            param.copy_(state["ema"])
            state["ema"].copy_(kept)


# -- calls -----------------------------------------------------------------------------------------


def with_closure(optimizer: Any, feed: Feed, step: int) -> Any:
    return optimizer.step(feed)


def with_closure_by_name(optimizer: Any, feed: Feed, step: int) -> Any:
    return optimizer.step(closure=feed)


def with_number(optimizer: Any, feed: Feed, step: int) -> Any:
    """A closure that returns a number and no tensor."""
    return optimizer.step(lambda: float(feed()))


def with_none(optimizer: Any, feed: Feed, step: int) -> Any:
    return optimizer.step(closure=None)


def with_rate(optimizer: Any, feed: Feed, step: int) -> Any:
    return optimizer.step(lr=0.1 / (1 + step))


def with_scale(optimizer: Any, feed: Feed, step: int) -> Any:
    return optimizer.step(scale=1.0 / (1 + step))


def with_scale_first(optimizer: Any, feed: Feed, step: int) -> Any:
    return optimizer.step(1.0 / (1 + step))


def with_gradients(optimizer: Any, feed: Feed, step: int) -> Any:
    return optimizer.step(grads=[p.grad * 2 for p in optimizer.param_groups[0]["params"]])


def in_two_steps(optimizer: Any, feed: Feed, step: int) -> None:
    optimizer.step()
    optimizer.second_step()


def without_gradients_on(optimizer: Any, feed: Feed, step: int) -> Any:
    with torch.no_grad():
        return optimizer.step()


def swap_twice(optimizer: Any, params: Params, step: int) -> None:
    if step == 2:
        optimizer.swap()
        optimizer.swap()


def swap_once(optimizer: Any, params: Params, step: int) -> None:
    if step == 2:
        optimizer.swap()


TRAPS = (
    Trap("returns-number", FAMILY, ReturnsNumber, "either"),
    Trap("returns-number-elementwise", FAMILY, ReturnsNumberElementwise, "either"),
    Trap("returns-norm", FAMILY, ReturnsNorm, "either"),
    Trap("returns-dict", FAMILY, ReturnsDict, "either"),
    Trap("returns-loss", FAMILY, ReturnsLoss, "equal", call=with_closure),
    Trap("returns-loss-by-name", FAMILY, ReturnsLoss, "equal", call=with_closure_by_name),
    Trap("returns-loss-as-number", FAMILY, ReturnsLoss, "equal", call=with_number),
    Trap("returns-nothing-for-none", FAMILY, ReturnsLoss, "equal", call=with_none),
    Trap("returns-itself", FAMILY, ReturnsItself, "either"),
    Trap("closure-late", FAMILY, ClosureLate, "either", call=with_closure),
    Trap("closure-twice", FAMILY, ClosureTwice, "either", call=with_closure),
    Trap("closure-between", FAMILY, ClosureBetween, "either", call=with_closure),
    Trap("closure-dropped", FAMILY, Cubic, "either", call=with_closure),
    Trap("loss-scales", FAMILY, LossScales, "either", call=with_closure),
    Trap("loss-decides", FAMILY, LossDecides, "either", call=with_closure),
    Trap("takes-rate", FAMILY, TakesRate, "either", call=with_rate),
    Trap("takes-scale", FAMILY, TakesAnything, "either", call=with_scale),
    Trap("takes-scale-first", FAMILY, TakesNumberFirst, "either", call=with_scale_first),
    Trap("takes-gradients", FAMILY, TakesGradients, "either", call=with_gradients),
    # Under FSDP2 the second method is not ours: DTensors compute it, with other sums.
    Trap("two-methods", FAMILY, TwoSteps, "either", call=in_two_steps, layouts=(PLAIN, DDP)),
    Trap("averages-swapped-twice", FAMILY, AveragesToSee, "either", edit=swap_twice),
    Trap("averages-swapped", FAMILY, AveragesToSee, "either", edit=swap_once),
    Trap("step-under-no-grad", FAMILY, Cubic, "equal", call=without_gradients_on),
)
