"""Surroundings: globals, closures, class attributes, default arguments, the environment, changed by the user."""

from __future__ import annotations

import contextvars
import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.harness.toy_optimizers import PerParameter, State, cube
from tests.harness.traps.trap import Feed, Params, Trap

FAMILY = "surroundings"


@dataclass
class Settings:
    """A config object of a module, as training scripts have."""

    factor: float = 1.0


FACTOR = 1.0
TABLE = {"factor": 1.0}
SETTINGS = Settings()
VARIABLE = "CANZONA_TRAP_FACTOR"
CONTEXT: contextvars.ContextVar[float] = contextvars.ContextVar("trap_factor", default=1.0)


def helper(grad: Tensor) -> Tensor:
    """What `change_helper` replaces."""
    return cube(grad)


class Around(PerParameter):
    """Base of optimizers whose factor lies outside of them."""

    def factor(self) -> float:
        raise NotImplementedError

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        param.add_(cube(grad), alpha=-group["lr"] * self.factor())


class ByGlobal(Around):
    """Reads a global of its module."""

    def factor(self) -> float:
        return FACTOR


class ByGlobalElementwise(ByGlobal):
    """The same without a matrix product."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        param.add_(grad, alpha=-group["lr"] * FACTOR)


class ByGlobalOnHost(ByGlobal):
    """The same, and nobody can trace it."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        update = cube(grad)
        if update.norm().item() > 2:
            update = update / update.norm()
        param.add_(update, alpha=-group["lr"] * FACTOR)


class ByGlobalDict(Around):
    """Reads an entry of a global dict."""

    def factor(self) -> float:
        return TABLE["factor"]


class BySettings(Around):
    """Reads a config object of its module."""

    def factor(self) -> float:
        return SETTINGS.factor


class ByEnvironment(Around):
    """Reads a variable of the environment."""

    def factor(self) -> float:
        return float(os.environ[VARIABLE])


class ByContext(Around):
    """Reads a context variable."""

    def factor(self) -> float:
        return CONTEXT.get()


class ByClass(Around):
    """Reads an attribute of its class."""

    common = 1.0

    def factor(self) -> float:
        return self.common


class ByDefaultArgument(Around):
    """Reads a dict that is the default of an argument."""

    def factor(self, table: dict[str, float] = {"value": 1.0}) -> float:  # noqa: B006 - a trap
        return table["value"]


class ByHelper(PerParameter):
    """Calls a function of its module."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        param.add_(helper(grad), alpha=-group["lr"])


class ByPrecision(PerParameter):
    """Asks torch for a setting."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        scale = 1.0 if torch.get_float32_matmul_precision() == "highest" else 0.5
        param.add_(cube(grad), alpha=-group["lr"] * scale)


class ByGenerator(PerParameter):
    """Draws from a generator of its own, in the order of the parameters."""

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        self.generator = torch.Generator().manual_seed(3)

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        noise = torch.rand((), generator=self.generator)
        param.sub_(cube(grad) * (noise * group["lr"]))


def by_closure(params: Params) -> Any:
    """A class that reads a variable of the function that made it."""
    factor = 1.0

    class ByClosure(Around):
        """Reads a cell."""

        def factor(self) -> float:
            return factor

    def change(value: float) -> None:
        nonlocal factor
        factor = value

    optimizer = ByClosure(params)
    optimizer.change = change  # type: ignore[attr-defined]
    return optimizer


# -- what the user does ----------------------------------------------------------------------------


def set_factor(value: float) -> None:
    global FACTOR
    FACTOR = value


def set_helper(value: Any) -> None:
    global helper
    helper = value


SETTERS: dict[Any, Any] = {
    ByGlobal: set_factor,
    ByGlobalElementwise: set_factor,
    ByGlobalOnHost: set_factor,
    ByGlobalDict: lambda value: TABLE.update(factor=value),
    BySettings: lambda value: setattr(SETTINGS, "factor", value),
    ByEnvironment: lambda value: os.environ.update({VARIABLE: str(value)}),
    ByContext: lambda value: CONTEXT.set(value),
    ByClass: lambda value: setattr(ByClass, "common", value),
    ByDefaultArgument: lambda value: ByDefaultArgument.factor.__defaults__[0].update(value=value),  # type: ignore[index]
}


def changed_midway(kind: Any, name: str, says: str) -> Trap:
    """A trap: what lies outside is 1 at first, and 2 from the third step on."""
    setter = SETTERS[kind]

    def make(params: Params) -> Any:
        setter(1.0)
        return kind(params)

    def edit(optimizer: Any, params: Params, step: int) -> None:
        if step == 2:
            setter(2.0)

    return Trap(name, FAMILY, make, "either", (says,), edit=edit)


def first_helper(params: Params) -> Any:
    set_helper(cube)
    return ByHelper(params)


def change_helper(optimizer: Any, params: Params, step: int) -> None:
    if step == 2:
        set_helper(torch.sign)


def step_in_low_precision(optimizer: Any, feed: Feed, step: int) -> Any:
    """Lower the precision for one step: 'high' rounds on a CPU as 'highest' does."""
    torch.set_float32_matmul_precision("high" if step == 2 else "highest")
    try:
        return optimizer.step()
    finally:
        torch.set_float32_matmul_precision("highest")


def change_closure(optimizer: Any, params: Params, step: int) -> None:
    if step == 2:
        optimizer.change(2.0)


TRAPS = (
    changed_midway(ByGlobal, "global", "FACTOR"),
    changed_midway(ByGlobalElementwise, "global-elementwise", "FACTOR"),
    changed_midway(ByGlobalOnHost, "global-on-host", "FACTOR"),
    changed_midway(ByGlobalDict, "global-dict", "TABLE"),
    changed_midway(BySettings, "global-settings", "SETTINGS"),
    changed_midway(ByEnvironment, "environment", "environ"),
    changed_midway(ByContext, "context-variable", "CONTEXT"),
    changed_midway(ByClass, "class-attribute", "common"),
    changed_midway(ByDefaultArgument, "default-argument", "factor"),
    Trap("global-function", FAMILY, first_helper, "either", ("helper",), edit=change_helper),
    Trap("precision-of-torch", FAMILY, ByPrecision, "either", call=step_in_low_precision),
    Trap("generator-of-its-own", FAMILY, ByGenerator, "either"),
    Trap("closure-variable", FAMILY, by_closure, "either", ("factor",), edit=change_closure),
)
