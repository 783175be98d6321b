"""Attributes changed between steps: what the user, or a hook of the user's, sets on the optimizer."""

from __future__ import annotations

import functools
import types
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.harness.toy_optimizers import PerParameter, State, cube
from tests.harness.traps.trap import Params, Trap, set_attribute, set_group

FAMILY = "attributes"


def square(grad: Tensor) -> Tensor:
    """Another matrix function."""
    return grad @ grad.T @ grad @ grad.T @ grad


class Scaled(PerParameter):
    """A number on the optimizer scales the update."""

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        self.factor: Any = 1.0

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        param.add_(cube(grad), alpha=-group["lr"] * float(self.factor))


class ScaledByNumpy(Scaled):
    """The same, and the number is one of NumPy's."""

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        self.factor = np.float64(1.0)


class ScaledElementwise(Scaled):
    """The same without a matrix product."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        average = state.setdefault("average", torch.zeros_like(param))
        average.lerp_(grad, 0.1)
        param.add_(average, alpha=-group["lr"] * self.factor)


class ScaledOnHost(Scaled):
    """The same, and nobody can trace it."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        update = cube(grad)
        if update.norm().item() > 2:
            update = update / update.norm()
        param.add_(update, alpha=-group["lr"] * self.factor)


class ScaledByTensor(Scaled):
    """A tensor on the optimizer scales the update."""

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        self.factor = torch.tensor(1.0)

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        param.sub_(cube(grad) * (self.factor * group["lr"]))


class ScaledByProperty(Scaled):
    """A property computes the number from another attribute."""

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        self.temperature = 1.0

    @property
    def heat(self) -> float:
        return 1.0 / (1.0 + self.temperature)

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        param.add_(cube(grad), alpha=-group["lr"] * self.heat)


class Mode(PerParameter):
    """A word on the optimizer chooses the algorithm."""

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        self.mode = "cube"

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        param.add_(cube(grad) if self.mode == "cube" else grad.sign(), alpha=-group["lr"])


class Transforming(PerParameter):
    """A function on the optimizer makes the update."""

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        self.transform: Any = cube

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        param.add_(self.transform(grad), alpha=-group["lr"])


class Configured(PerParameter):
    """A dict on the optimizer, with a dict inside, holds hyperparameters."""

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        self.config: Any = {"factor": 1.0, "inner": {"decay": 0.0}}

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        param.mul_(1 - group["lr"] * self.config["inner"]["decay"])
        param.add_(cube(grad), alpha=-group["lr"] * self.config["factor"])


class ConfiguredByObject(PerParameter):
    """An object on the optimizer holds hyperparameters."""

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        self.config = SimpleNamespace(factor=1.0)

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        param.add_(cube(grad), alpha=-group["lr"] * self.config.factor)


class ConfiguredByList(PerParameter):
    """A list on the optimizer holds the coefficients of a polynomial."""

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        self.coefficients = [1.0]

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        power = grad
        for coefficient in self.coefficients:
            power = power @ grad.T @ grad
            param.add_(power, alpha=-group["lr"] * coefficient)


class Boosted(PerParameter):
    """Asks whether the optimizer has an attribute."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        param.add_(cube(grad), alpha=-group["lr"] * (self.boost if hasattr(self, "boost") else 1.0))


class Chosen(PerParameter):
    """A hyperparameter names the attribute that counts."""

    slow, fast = 0.5, 2.0

    def __init__(self, params: Params) -> None:
        super().__init__(params, which="slow")

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        param.add_(cube(grad), alpha=-group["lr"] * getattr(self, group["which"]))


class ByDefaults(PerParameter):
    """Reads `self.defaults` and not the group."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        param.add_(cube(grad), alpha=-self.defaults["lr"])


class Modal(PerParameter):
    """Has `train` and `eval`, which set a flag."""

    training = True

    def train(self) -> None:
        self.training = True

    def eval(self) -> None:
        self.training = False

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        param.add_(cube(grad), alpha=-group["lr"] * (1.0 if self.training else 0.1))


class ScheduleFree(PerParameter):
    """Between `train` and `eval` parameters move to their average and back, as in schedule-free methods."""

    training = True

    def __init__(self, params: Params) -> None:
        super().__init__(params, beta=0.9)

    @torch.no_grad()
    def swap(self, weight: float) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if "z" in self.state[param]:
                    param.lerp_(self.state[param]["z"], weight)
        self.training = not self.training

    def train(self) -> None:
        if not self.training:
            self.swap(0.1)

    def eval(self) -> None:
        if self.training:
            self.swap(-1 / 9)

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        if not state:
            state.update(z=param.clone(), step=0)
        state["step"] += 1
        update = self.direction(grad)
        param.lerp_(state["z"], 1 / state["step"])
        param.add_(update, alpha=-group["lr"] * (1 - group["beta"]))
        state["z"].sub_(update * group["lr"])

    def direction(self, grad: Tensor) -> Tensor:
        return cube(grad)


class ScheduleFreeElementwise(ScheduleFree):
    """The same without a matrix product."""

    def direction(self, grad: Tensor) -> Tensor:
        return grad


# -- edits -----------------------------------------------------------------------------------------


def append_coefficient(optimizer: Any, params: Params, step: int) -> None:
    if step == 2:
        optimizer.coefficients.append(0.25)


def change_config(optimizer: Any, params: Params, step: int) -> None:
    if step == 2:
        optimizer.config["factor"] = 2.0


def change_inner_config(optimizer: Any, params: Params, step: int) -> None:
    if step == 2:
        optimizer.config["inner"]["decay"] = 0.5


def change_config_object(optimizer: Any, params: Params, step: int) -> None:
    if step == 2:
        optimizer.config.factor = 2.0


def change_defaults(optimizer: Any, params: Params, step: int) -> None:
    if step == 2:
        optimizer.defaults["lr"] = 0.3


def double_tensor(optimizer: Any, params: Params, step: int) -> None:
    if step == 2:
        optimizer.factor.mul_(2.0)


def delete_boost(optimizer: Any, params: Params, step: int) -> None:
    if step == 0:
        optimizer.boost = 2.0
    if step == 2:
        del optimizer.boost


def replace_method(optimizer: Any, params: Params, step: int) -> None:
    def update(self: Any, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        param.add_(grad.sign(), alpha=-group["lr"])

    if step == 2:
        optimizer.update = types.MethodType(update, optimizer)


def look_twice(optimizer: Any, params: Params, step: int) -> None:
    """Go to `eval` and back, as one does to validate."""
    if step == 2:
        optimizer.eval()
        optimizer.train()


def turn_to_eval(optimizer: Any, params: Params, step: int) -> None:
    if step == 2:
        optimizer.eval()


def scale_by_loss(optimizer: Any, params: Params, step: int) -> None:
    """Hand over a number that is another one at every step."""
    optimizer.factor = 1.0 / (1.0 + 0.7 * step)


def hook_before(params: Params) -> Any:
    """A hook that runs before each step hands over a number."""
    optimizer, handed = Scaled(params), iter(range(1, 100))
    optimizer.register_step_pre_hook(lambda opt, args, kwargs: setattr(opt, "factor", 1.0 / next(handed)))
    return optimizer


def hook_after(params: Params) -> Any:
    """A hook that runs after each step lets a number decay."""
    optimizer = Scaled(params)
    optimizer.register_step_post_hook(lambda opt, args, kwargs: setattr(opt, "factor", opt.factor * 0.5))
    return optimizer


TRAPS = (
    Trap("attribute-float", FAMILY, Scaled, "equal", edit=set_attribute("factor", 2.0)),
    Trap("attribute-becomes-int", FAMILY, Scaled, "equal", edit=set_attribute("factor", 2)),
    Trap("attribute-becomes-zero", FAMILY, Scaled, "equal", edit=set_attribute("factor", 0.0)),
    Trap("attribute-every-step", FAMILY, Scaled, "equal", edit=scale_by_loss),
    Trap("attribute-elementwise", FAMILY, ScaledElementwise, "equal", edit=scale_by_loss),
    Trap("attribute-on-host", FAMILY, ScaledOnHost, "equal", edit=scale_by_loss),
    Trap("attribute-numpy", FAMILY, ScaledByNumpy, "equal", edit=set_attribute("factor", np.float64(2.0))),
    Trap("attribute-tensor-written", FAMILY, ScaledByTensor, "either", ("factor",), edit=double_tensor),
    Trap(
        "attribute-tensor-replaced",
        FAMILY,
        ScaledByTensor,
        "either",
        ("factor",),
        edit=set_attribute("factor", torch.tensor(2.0)),
    ),
    Trap("attribute-behind-property", FAMILY, ScaledByProperty, "equal", edit=set_attribute("temperature", 3.0)),
    Trap("attribute-word", FAMILY, Mode, "equal", edit=set_attribute("mode", "sign")),
    Trap("attribute-function", FAMILY, Transforming, "equal", edit=set_attribute("transform", square)),
    Trap("attribute-lambda", FAMILY, Transforming, "equal", edit=set_attribute("transform", lambda grad: grad * 2)),
    Trap(
        "attribute-partial",
        FAMILY,
        Transforming,
        "equal",
        edit=set_attribute("transform", functools.partial(torch.mul, other=3.0)),
    ),
    Trap("attribute-dict-entry", FAMILY, Configured, "equal", edit=change_config),
    Trap("attribute-dict-in-dict", FAMILY, Configured, "equal", edit=change_inner_config),
    Trap("attribute-object", FAMILY, ConfiguredByObject, "equal", edit=change_config_object),
    Trap(
        "attribute-object-replaced",
        FAMILY,
        ConfiguredByObject,
        "equal",
        edit=set_attribute("config", SimpleNamespace(factor=2.0)),
    ),
    Trap("attribute-list", FAMILY, ConfiguredByList, "equal", edit=append_coefficient),
    Trap("attribute-appears", FAMILY, Boosted, "equal", edit=set_attribute("boost", 2.0)),
    Trap("attribute-goes", FAMILY, Boosted, "equal", edit=delete_boost),
    Trap("attribute-named-by-group", FAMILY, Chosen, "equal", edit=set_group("which", "fast", at=2)),
    Trap("method-replaced", FAMILY, Scaled, "either", ("update",), edit=replace_method),
    Trap("defaults", FAMILY, ByDefaults, "either", ("defaults",), edit=change_defaults),
    Trap("mode-flag", FAMILY, Modal, "equal", edit=turn_to_eval),
    Trap("schedule-free", FAMILY, ScheduleFree, "either", edit=look_twice),
    Trap("schedule-free-elementwise", FAMILY, ScheduleFreeElementwise, "equal", edit=look_twice),
    Trap("hook-before-step", FAMILY, hook_before, "equal"),
    Trap("hook-after-step", FAMILY, hook_after, "equal"),
)
