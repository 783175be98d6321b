"""Harmless optimizers: they look suspicious, and have to be followed bit for bit. Refusing them all would be easy."""

from __future__ import annotations

import enum
import functools
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from tests.harness.toy_optimizers import PerParameter, State, cube
from tests.harness.traps.trap import Params, Trap

FAMILY = "harmless"

POWER = 3
COEFFICIENTS = (1.0, -0.1, 0.01)
RULES = {"tall": 0.5, "wide": 2.0}
SCALE = torch.tensor(0.5)
LIMITS = np.array([0.5, 2.0])
LOG = logging.Logger("of an optimizer")


class Kind(enum.Enum):
    """A word for an algorithm."""

    CUBE = "cube"
    SIGN = "sign"


@dataclass(frozen=True)
class Recipe:
    """Hyperparameters that nobody changes."""

    factor: float = 0.7
    power: int = 2


class Pair(NamedTuple):
    """Two decay rates."""

    first: float
    second: float


def powers(grad: Tensor, coefficients: tuple[float, ...] = COEFFICIENTS) -> Tensor:
    """A polynomial, with a default argument that nobody can change."""
    total, power = torch.zeros_like(grad), grad
    for coefficient in coefficients:
        power = power @ grad.T @ grad
        total = total + coefficient * power
    return total


def make_scaling(factor: float) -> Callable[[Tensor], Tensor]:
    """A function with a constant in its closure."""

    def scaled(value: Tensor) -> Tensor:
        return value * factor

    return scaled


HALVED = make_scaling(0.5)


def checked(update: Any) -> Any:
    """A decorator that passes everything on."""

    @functools.wraps(update)
    def inner(self: Any, *args: Any, **kwargs: Any) -> Any:
        return update(self, *args, **kwargs)

    return inner


class NestedFunctions(PerParameter):
    """Defines functions inside of its step."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        lr = group["lr"]

        def turned(value: Tensor) -> Tensor:
            return value.T if value.shape[0] > value.shape[1] else value

        def scaled(value: Tensor) -> Any:
            return cube(value) * lr

        update = scaled(turned(grad))
        param.sub_(update if update.shape == param.shape else update.T)


class GlobalNumbers(PerParameter):
    """Reads numbers, tuples and dicts that are globals."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        rule = RULES["tall" if param.shape[0] > param.shape[1] else "wide"]
        param.add_(powers(grad) / POWER, alpha=-group["lr"] * rule)


class GlobalArray(PerParameter):
    """Reads an array of NumPy's that is a global, and `math.pi`."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        param.add_(cube(grad).clamp(-float(LIMITS[1]), math.pi), alpha=-group["lr"])


class GlobalTensor(PerParameter):
    """Reads a tensor that is a global, and that nobody writes."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        param.sub_(cube(grad) * (SCALE * group["lr"]))


class ConstantClosure(PerParameter):
    """Calls a function whose closure holds a constant."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        param.add_(HALVED(cube(grad)), alpha=-group["lr"])


class DictOfHypers(PerParameter):
    """Keeps its hyperparameters in a dict on itself."""

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        self.hypers = {"beta": 0.9, "nested": {"power": 2}, "names": ["a", "b"]}

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        hypers: Any = self.hypers
        average = state.setdefault("average", torch.zeros_like(param))
        average.lerp_(grad, 1 - hypers["beta"])
        update = average
        for _ in range(hypers["nested"]["power"]):
            update = cube(update)
        param.add_(update, alpha=-group["lr"])


class RateByProperty(PerParameter):
    """Has its learning rate as a property with a setter."""

    @property
    def lr(self) -> float:
        return float(self.param_groups[0]["lr"])

    @lr.setter
    def lr(self, value: float) -> None:
        for group in self.param_groups:
            group["lr"] = value

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        param.add_(cube(grad), alpha=-group["lr"])


class Base(PerParameter):
    """Has a step in pieces, for subclasses."""

    def decay(self, param: Tensor, group: dict[str, Any]) -> None:
        param.mul_(1 - group["lr"] * 0.1)

    def direction(self, grad: Tensor) -> Tensor:
        return cube(grad)

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        self.decay(param, group)
        param.add_(self.direction(grad), alpha=-group["lr"])


class Subclass(Base):
    """Calls what it inherits, by `super`."""

    def direction(self, grad: Tensor) -> Tensor:
        return super().direction(grad) * 0.5

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Mixin:
    """Brings a method along."""

    power = 2

    def raised(self, value: Tensor) -> Tensor:
        for _ in range(self.power):
            value = cube(value) * 0.1
        return value


class Mixed(Mixin, PerParameter):
    """Inherits from two classes."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        param.add_(self.raised(grad), alpha=-group["lr"])


class Methods(PerParameter):
    """Has static methods and class methods."""

    exponent = 0.5

    @staticmethod
    def tallness(param: Tensor) -> float:
        return max(1.0, param.shape[0] / param.shape[1])

    @classmethod
    def scale(cls, param: Tensor) -> float:
        return float(cls.tallness(param) ** cls.exponent)

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        param.add_(cube(grad), alpha=-group["lr"] * self.scale(param))


class Configured(PerParameter):
    """Has a frozen dataclass, a named tuple and an Enum as hyperparameters."""

    def __init__(self, params: Params) -> None:
        super().__init__(params, kind=Kind.CUBE, betas=Pair(0.9, 0.99))
        self.recipe = Recipe()

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        average = state.setdefault("average", torch.zeros_like(param))
        average.lerp_(grad, 1 - group["betas"].first)
        update = cube(average) if group["kind"] is Kind.CUBE else average.sign()
        param.add_(update, alpha=-group["lr"] * self.recipe.factor**self.recipe.power)


class Functions(PerParameter):
    """Holds a function, a lambda and a partial, which nobody changes."""

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        self.root = cube
        self.scaling = functools.partial(torch.mul, other=0.5)
        self.sign: Any = lambda value: value.sign() * 0.1

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        param.add_(self.scaling(self.root(grad)) + self.sign(grad), alpha=-group["lr"])


class Decorated(PerParameter):
    """Has its update decorated."""

    @checked
    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        param.add_(cube(grad), alpha=-group["lr"])


class Trying(PerParameter):
    """Catches what does not happen."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        try:
            update = cube(grad)
        except RuntimeError:
            update = grad
        param.add_(update, alpha=-group["lr"])


class Dispatching(PerParameter):
    """Asks for types, dims and strides that are always the same."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        if not isinstance(grad, Tensor) or grad.is_sparse or grad.ndim != 2 or not param.is_floating_point():
            raise RuntimeError("a matrix is needed")
        param.add_(cube(grad), alpha=-group["lr"])


class OnHost(PerParameter):
    """Branches on a value of its own gradient."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        norm = grad.norm().item()
        update = cube(grad) / max(norm, 1.0) if norm > 0.5 else grad
        param.add_(update, alpha=-group["lr"])


class NotANumber(PerParameter):
    """Replaces what is not finite, by tensor operations."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        param.add_(cube(torch.nan_to_num(grad)), alpha=-group["lr"])


class Lists(Optimizer):
    """Collects lists first and walks through them afterwards, as torch does."""

    def __init__(self, params: Params) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            grads = [p.grad for p in params]
            averages = [self.state[p].setdefault("average", torch.zeros_like(p)) for p in params]
            for param, grad, average in zip(params, grads, averages, strict=True):
                average.lerp_(grad, 0.3)
                param.add_(cube(average), alpha=-group["lr"])


class Backwards(Optimizer):
    """Goes from the last parameter to the first."""

    def __init__(self, params: Params) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in reversed(self.param_groups):
            for param in reversed(group["params"]):
                param.add_(cube(param.grad), alpha=-group["lr"])


class StateAtOnce(PerParameter):
    """Makes its state when it is made, as Adagrad does."""

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param].update(sum=torch.full_like(param, 0.1), step=torch.tensor(0.0))

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        state["step"] += 1
        state["sum"].addcmul_(grad, grad)
        param.addcdiv_(grad, state["sum"].sqrt(), value=-group["lr"])


class StateAtOnceMatrix(StateAtOnce):
    """The same with a matrix product."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        state["sum"].lerp_(grad, 0.3)
        param.add_(cube(state["sum"]), alpha=-group["lr"])


class Logging(PerParameter):
    """Writes to a log on levels of its own; the logger remembers of each whether it is on."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        LOG.log(-time.perf_counter_ns(), "a step")
        param.add_(cube(grad), alpha=-group["lr"])


class SlowInState(PerParameter):
    """Lookahead with slow weights in the state."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        if not state:
            state.update(step=0, slow=param.clone())
        state["step"] += 1
        param.add_(cube(grad), alpha=-group["lr"])
        if state["step"] % 3 == 0:
            state["slow"].lerp_(param, 0.5)
            param.copy_(state["slow"])


TRAPS = tuple(
    Trap(name, FAMILY, kind, "equal")
    for name, kind in (
        ("nested-functions", NestedFunctions),
        ("global-numbers", GlobalNumbers),
        ("global-array", GlobalArray),
        ("global-tensor", GlobalTensor),
        ("constant-closure", ConstantClosure),
        ("dict-of-hypers", DictOfHypers),
        ("rate-by-property", RateByProperty),
        ("subclass", Subclass),
        ("mixin", Mixed),
        ("static-and-class-methods", Methods),
        ("dataclass-and-enum", Configured),
        ("functions-on-itself", Functions),
        ("decorated-update", Decorated),
        ("try-without-error", Trying),
        ("asks-for-types", Dispatching),
        ("own-norm-on-host", OnHost),
        ("nan-to-num", NotANumber),
        ("lists-first", Lists),
        ("backwards", Backwards),
        ("state-at-once", StateAtOnce),
        ("state-at-once-matrix", StateAtOnceMatrix),
        ("logging", Logging),
        ("slow-weights-in-state", SlowInState),
    )
)
