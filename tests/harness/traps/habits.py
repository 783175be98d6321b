"""Habits of optimizers: what they show in groups and attributes, closures over parameters, optimizers inside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from tests.harness.toy_optimizers import PerParameter, State, cube
from tests.harness.traps.trap import Params, Trap, halves

FAMILY = "habits"

# -- what a step shows of the last parameter ---------------------------------------------------------


class RateByNorm(PerParameter):
    """Computes the learning rate of its group from a gradient; the group shows that of the last parameter."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        group["lr"] = 0.1 / (1 + float(grad.norm()))
        param.add_(cube(grad), alpha=-group["lr"])


class RateByNormElementwise(PerParameter):
    """The same without a matrix product."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        group["lr"] = 0.1 / (1 + float(grad.norm()))
        param.add_(grad, alpha=-group["lr"])


class RateOfLastStep(PerParameter):
    """Every parameter begins with what the one before it left."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        param.add_(cube(grad), alpha=-group.get("used", 0.1))
        group["used"] = 0.1 / (1 + float(grad.norm()))


class ClampedRate(PerParameter):
    """The group shows a factor, which is 1 unless a gradient is huge."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        group["factor"] = min(1.0, 1000.0 / (1e-12 + float(grad.norm())))
        param.add_(cube(grad * group["factor"]), alpha=-group["lr"])


class RateOfGroup(PerParameter):
    """Computes the learning rate of each group from the gradients of the group, before it steps any parameter."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            norms = [float(p.grad.norm()) for p in group["params"] if p.grad is not None]
            group["lr"] = 0.1 / (1 + sum(norms))
            for param in group["params"]:
                param.add_(cube(param.grad), alpha=-group["lr"])


class LastGradient(PerParameter):
    """Puts the last gradient into the group."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        group["last"] = grad.clone()
        param.add_(cube(grad), alpha=-group["lr"])


class LastGradientItself(PerParameter):
    """Puts the last gradient itself into the group."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        group["last"] = grad
        param.add_(cube(grad), alpha=-group["lr"])


class NormOnItself(PerParameter):
    """Leaves the last norm as an attribute."""

    last: Any = None

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        self.last = self.told(grad.norm())
        param.add_(cube(grad), alpha=-group["lr"])

    def told(self, norm: Tensor) -> Any:
        return float(norm)


class NormAsTensorOnItself(NormOnItself):
    """The same as a tensor."""

    def told(self, norm: Tensor) -> Any:
        return norm


class NormsOnItself(NormOnItself):
    """The same in a list."""

    def told(self, norm: Tensor) -> Any:
        return [float(norm)]


class CountedOnItself(PerParameter):
    """A map by parameter, and a counter of steps beside it."""

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        self.moments: dict[Tensor, Tensor] = {}
        self.count = 0

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        self.count += 1
        super().step()

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        moment = self.moments.setdefault(param, torch.zeros_like(param))
        moment.lerp_(grad, 0.1)
        param.add_(cube(moment), alpha=-group["lr"] / self.count)


# -- closures ----------------------------------------------------------------------------------------


class ClosureOverParameters(Optimizer):
    """A function on the optimizer, made in the constructor, steps the parameters that it closes over."""

    def __init__(self, params: Params) -> None:
        super().__init__(params, {"lr": 0.1})
        own = [p for group in self.param_groups for p in group["params"]]

        def work() -> None:
            for param in own:
                if param.grad is not None:
                    param.sub_(cube(param.grad) * 0.1)

        self.work = work

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.work()


class ClosuresInList(ClosureOverParameters):
    """One function per parameter, in a list."""

    def __init__(self, params: Params) -> None:
        super().__init__(params)

        def made(param: Tensor) -> Callable[[], Any]:
            return lambda: None if param.grad is None else param.sub_(cube(param.grad) * 0.1)

        updates = [made(p) for group in self.param_groups for p in group["params"]]
        self.work = lambda: [update() for update in updates]  # type: ignore[assignment,return-value]


class ClosureThatDecays(PerParameter):
    """Steps as others do; a function on the optimizer then lets all parameters decay."""

    def __init__(self, params: Params) -> None:
        super().__init__(params)

        def decay() -> None:
            for group in self.param_groups:
                for param in group["params"]:
                    param.mul_(0.9)

        self.decay = decay

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        super().step()
        self.decay()

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        param.add_(cube(grad), alpha=-group["lr"])


class FunctionsWithDefaults(PerParameter):
    """One function per parameter, which has the parameter as a default argument."""

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        own = [p for group in self.param_groups for p in group["params"]]
        self.updates = [lambda rate, p=p: None if p.grad is None else p.sub_(cube(p.grad) * rate) for p in own]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for update in self.updates:
            update(0.1)


class FunctionOnParameter(PerParameter):
    """An attribute of each parameter is a function that steps it."""

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        for group in self.param_groups:
            for param in group["params"]:
                param.work = stepping(param)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.work()


class FunctionsInGroup(PerParameter):
    """A group holds a list of functions that step its parameters."""

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        for group in self.param_groups:
            group["work"] = list(map(stepping, group["params"]))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for work in group["work"]:
                work()


def stepping(param: Tensor) -> Callable[[], Any]:
    """A function that steps a parameter."""
    return lambda: None if param.grad is None else param.sub_(cube(param.grad) * 0.1)


# -- optimizers inside of optimizers -----------------------------------------------------------------


class Holder(Optimizer):
    """Stands for another optimizer: has its groups and its state, and steps it."""

    def __init__(self, base: Optimizer) -> None:
        super().__init__(base.param_groups, base.defaults)
        self.base = base
        self.param_groups, self.state = base.param_groups, base.state

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base.step()


class Halving(Holder):
    """Halves gradients before that."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in (p for group in self.param_groups for p in group["params"]):
            if param.grad is not None:
                param.grad.mul_(0.5)
        super().step()


class Lookahead(PerParameter):
    """Makes an optimizer of its own parameters, and steps that before it does its own work."""

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        self.fast = SGD(self.param_groups[0]["params"], lr=0.1, momentum=0.9)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        self.fast.step()
        super().step()

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        slow = state.setdefault("slow", param.clone())
        slow.lerp_(param, 0.5)
        param.copy_(slow)


def holder(momentum: float, kind: Any = Holder) -> Callable[[Params], Any]:
    return lambda params: kind(SGD(params, lr=0.1, momentum=momentum))


# -- what the user does ------------------------------------------------------------------------------


def enlarge(grad: Tensor, place: int, step: int) -> Tensor:
    """All gradients are huge in the third step."""
    return grad * 1e4 if step == 2 else grad


def one_each(kind: Any) -> Callable[[Params], Any]:
    """A group for every parameter."""
    return lambda params: kind([{"params": [param]} for param in params])


def last_of(optimizer: Any) -> Any:
    return optimizer.last


ONE = ((5, 3),)
TRAPS = (
    Trap("group-shows-rate-by-norm", FAMILY, RateByNorm, "equal"),
    Trap("group-shows-rate-by-norm-of-one", FAMILY, RateByNorm, "equal", shapes=ONE),
    Trap("group-shows-rate-by-norm-in-groups", FAMILY, lambda params: RateByNorm(halves(params)), "equal"),
    Trap("group-shows-rate-by-norm-in-one-each", FAMILY, one_each(RateByNorm), "equal"),
    Trap("group-shows-rate-elementwise", FAMILY, RateByNormElementwise, "equal"),
    Trap("group-hands-on-a-rate", FAMILY, RateOfLastStep, "equal"),
    Trap("group-shows-clamped-factor", FAMILY, ClampedRate, "equal", grads=enlarge),
    Trap("group-shows-rate-of-group", FAMILY, RateOfGroup, "equal"),
    Trap("group-shows-rate-of-group-in-one-each", FAMILY, one_each(RateOfGroup), "equal"),
    Trap("group-shows-last-gradient", FAMILY, LastGradient, "equal"),
    Trap("group-shows-last-gradient-itself", FAMILY, LastGradientItself, "equal"),
    Trap("attribute-shows-norm", FAMILY, NormOnItself, "equal", seen=last_of),
    Trap("attribute-shows-norm-of-one", FAMILY, NormOnItself, "equal", seen=last_of, shapes=ONE),
    Trap("attribute-shows-tensor", FAMILY, NormAsTensorOnItself, "equal", seen=last_of),
    Trap("attribute-shows-list", FAMILY, NormsOnItself, "equal", seen=last_of),
    Trap("attribute-shows-list-of-one", FAMILY, NormsOnItself, "equal", seen=last_of, shapes=ONE),
    Trap("attribute-counts-beside-a-map", FAMILY, CountedOnItself, "equal", seen=lambda o: o.count),
    Trap("attribute-counts-beside-a-map-of-one", FAMILY, CountedOnItself, "equal", seen=lambda o: o.count, shapes=ONE),
    Trap("closure-steps-parameters", FAMILY, ClosureOverParameters, "equal"),
    Trap("closures-in-list", FAMILY, ClosuresInList, "equal"),
    Trap("closure-decays-parameters", FAMILY, ClosureThatDecays, "equal"),
    Trap("closure-default-argument", FAMILY, FunctionsWithDefaults, "either"),
    Trap("closure-on-parameter", FAMILY, FunctionOnParameter, "either"),
    Trap("closure-in-group", FAMILY, FunctionsInGroup, "either"),
    Trap("optimizer-inside", FAMILY, holder(0.0), "equal"),
    Trap("optimizer-inside-with-momentum", FAMILY, holder(0.9), "equal"),
    Trap("optimizer-inside-of-two", FAMILY, holder(0.0), "equal", shapes=((5, 3), (3, 5))),
    Trap("optimizer-inside-halved", FAMILY, holder(0.0, Halving), "refused", ("wrap that one", "self.base")),
    Trap("optimizer-inside-halved-with-momentum", FAMILY, holder(0.9, Halving), "refused", ("wrap that one",)),
    Trap("optimizer-inside-lookahead", FAMILY, Lookahead, "equal"),
)
