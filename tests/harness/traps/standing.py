"""Where a parameter stands: its attributes and its identity. Its place among others is in `places`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from tests.harness.toy_optimizers import PerParameter, State, cube
from tests.harness.traps.trap import DDP, PLAIN, Params, Trap

FAMILY = "standing"

# -- attributes of parameters ----------------------------------------------------------------------


class RateOfParameter(PerParameter):
    """Multiplies the learning rate by an attribute of the parameter, as modded-nanogpt does."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        param.add_(cube(grad), alpha=-group["lr"] * getattr(param, "lr_mul", 1.0))


class RateOfParameterElementwise(PerParameter):
    """The same without a matrix product, with momentum."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        average = state.setdefault("average", torch.zeros_like(param))
        average.lerp_(grad, 0.1)
        param.add_(average, alpha=-group["lr"] * getattr(param, "lr_mul", 1.0))


class RateOfParameterOnHost(PerParameter):
    """The same, and nobody can trace it."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        update = cube(grad)
        if update.norm().item() > 2:
            update = update / update.norm()
        param.add_(update, alpha=-group["lr"] * getattr(param, "lr_mul", 1.0))


class KindOfParameter(PerParameter):
    """An attribute of the parameter says which of two algorithms is meant."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        update = cube(grad) if getattr(param, "use_muon", False) else grad.sign()
        param.add_(update, alpha=-group["lr"])


class NameOfParameter(PerParameter):
    """A name that the user gave to the parameter decides."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        label: Any = getattr(param, "label", "")
        param.add_(cube(grad), alpha=-group["lr"] * (0.5 if "head" in label else 1.0))


class SpecOfParameter(PerParameter):
    """An object on the parameter holds its hyperparameters."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        spec: Any = param.spec  # type: ignore[attr-defined]
        param.mul_(1 - group["lr"] * spec.decay)
        param.add_(cube(grad), alpha=-group["lr"] * spec.rate)


class CountOnParameter(PerParameter):
    """Counts steps in an attribute of the parameter."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        holder: Any = param
        holder.steps_taken += 1
        param.add_(cube(grad), alpha=-group["lr"] / holder.steps_taken)


class TensorOnParameter(PerParameter):
    """A tensor of no dims on the parameter scales its update."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        param.add_(cube(grad) * param.gain, alpha=-group["lr"])  # type: ignore[attr-defined]


class OptionsOfParameter(PerParameter):
    """A dict on the parameter, if there is one, says how it is updated."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        options = getattr(param, "options", {})
        scale = options.get("scale", 2.0 if options.get("twice") else 1.0)
        param.add_(cube(grad) * scale, alpha=-group["lr"])


def give_rates(params: Params) -> None:
    for i, param in enumerate(params):
        param.lr_mul = 1.0 + i


def give_kinds(params: Params) -> None:
    for i, param in enumerate(params):
        param.use_muon = i % 2 == 0


def give_labels(params: Params) -> None:
    for i, param in enumerate(params):
        param.label = "head" if i == 1 else f"layers.{i}"


def give_specs(params: Params) -> None:
    for i, param in enumerate(params):
        param.spec = SimpleNamespace(rate=1.0 + i, decay=0.1 * i)


def give_counts(params: Params) -> None:
    for i, param in enumerate(params):
        param.steps_taken = i


def give_gains(params: Params) -> None:
    for i, param in enumerate(params):
        param.gain = torch.tensor(1.0 + i)


def change_rate(optimizer: Any, params: Params, step: int) -> None:
    if step == 2:
        params[1].lr_mul = 3.0


def change_spec(optimizer: Any, params: Params, step: int) -> None:
    if step == 2:
        params[1].spec.rate = 5.0


def give_options(optimizer: Any, params: Params, step: int) -> None:
    if step == 2:
        params[1].options = {"twice": True}


def change_options(optimizer: Any, params: Params, step: int) -> None:
    if step == 0:
        for param in params:
            param.options = {"twice": False}
    if step == 2:
        params[1].options["twice"] = True


def rescale_options(optimizer: Any, params: Params, step: int) -> None:
    if step == 0:
        for param in params:
            param.options = {"scale": 1.0}
    if step == 2:
        params[1].options["scale"] = 3.0


def rescale_options_late(optimizer: Any, params: Params, step: int) -> None:
    params[1].options = {"scale": 3.0} if step == 5 else {"note": "x" * step}


def give_options_after_explaining(optimizer: Any, params: Params, step: int) -> None:
    if step == 0:
        if hasattr(optimizer, "canzona"):
            optimizer.canzona.explain()
        params[1].options = {"twice": True}


def give_options_with_rates(optimizer: Any, params: Params, step: int) -> None:
    if step == 2:
        params[0].lr_mul = 3.0
        params[1].options = {"twice": True}


def give_options_after_loading(optimizer: Any, params: Params, step: int) -> None:
    if step == 2:
        optimizer.load_state_dict(optimizer.state_dict())
        params[1].options = {"twice": True}


# -- its identity ----------------------------------------------------------------------------------


class Special(PerParameter):
    """Base of optimizers that recognise one of their parameters."""

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        self.special: Any = self.mark(params)

    def mark(self, params: Params) -> Any:
        raise NotImplementedError

    def scale(self, param: Tensor) -> float:
        raise NotImplementedError

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        param.add_(cube(grad), alpha=-group["lr"] * self.scale(param))


class KnownById(Special):
    """Keeps ids."""

    def mark(self, params: Params) -> Any:
        return {id(params[1])}

    def scale(self, param: Tensor) -> float:
        return 0.3 if id(param) in self.special else 1.0


class KnownByAddress(Special):
    """Keeps addresses of data."""

    def mark(self, params: Params) -> Any:
        return {params[1].data_ptr()}

    def scale(self, param: Tensor) -> float:
        return 0.3 if param.data_ptr() in self.special else 1.0


class KnownInSet(Special):
    """Keeps the parameters themselves in a set."""

    def mark(self, params: Params) -> Any:
        return {params[1], params[2]}

    def scale(self, param: Tensor) -> float:
        return 0.3 if param in self.special else 1.0


class KnownAsAttribute(Special):
    """Keeps the parameter itself."""

    def mark(self, params: Params) -> Any:
        return params[1]

    def scale(self, param: Tensor) -> float:
        return 0.3 if param is self.special else 1.0


class ScalesById(Special):
    """Keeps a number for every id."""

    def mark(self, params: Params) -> Any:
        return {id(p): 1.0 + i for i, p in enumerate(params)}

    def scale(self, param: Tensor) -> float:
        return float(self.special.get(id(param), 1.0))


class ScalesByParameter(Special):
    """Keeps a number for every parameter."""

    def mark(self, params: Params) -> Any:
        return {p: 1.0 + i for i, p in enumerate(params)}

    def scale(self, param: Tensor) -> float:
        return float(self.special.get(param, 1.0))


class ScalesByWeakReference(Special):
    """Keeps a number for every parameter as long as it lives."""

    def mark(self, params: Params) -> Any:
        scales = WeakTensorKeyDictionary()
        for i, param in enumerate(params):
            scales[param] = 1.0 + i
        return scales

    def scale(self, param: Tensor) -> float:
        return float(self.special.get(param, 1.0))


TRAPS = (
    Trap("lr-mul", FAMILY, RateOfParameter, "equal", prepare=give_rates),
    Trap("lr-mul-of-one", FAMILY, RateOfParameter, "equal", edit=change_rate),
    Trap("lr-mul-changed", FAMILY, RateOfParameter, "equal", prepare=give_rates, edit=change_rate),
    Trap("lr-mul-elementwise", FAMILY, RateOfParameterElementwise, "equal", prepare=give_rates),
    Trap(
        "lr-mul-elementwise-changed",
        FAMILY,
        RateOfParameterElementwise,
        "equal",
        prepare=give_rates,
        edit=change_rate,
    ),
    Trap("lr-mul-on-host", FAMILY, RateOfParameterOnHost, "equal", prepare=give_rates),
    Trap("use-muon-of-parameter", FAMILY, KindOfParameter, "equal", prepare=give_kinds),
    Trap("label-of-parameter", FAMILY, NameOfParameter, "equal", prepare=give_labels),
    Trap("spec-of-parameter", FAMILY, SpecOfParameter, "either", ("spec",), prepare=give_specs),
    Trap(
        "spec-of-parameter-changed",
        FAMILY,
        SpecOfParameter,
        "either",
        ("spec",),
        prepare=give_specs,
        edit=change_spec,
    ),
    Trap("count-on-parameter", FAMILY, CountOnParameter, "either", ("steps_taken",), prepare=give_counts),
    Trap("tensor-on-parameter", FAMILY, TensorOnParameter, "either", ("gain",), prepare=give_gains),
    Trap("options-of-parameter-given", FAMILY, OptionsOfParameter, "either", ("options",), edit=give_options),
    Trap("options-of-parameter-changed", FAMILY, OptionsOfParameter, "either", ("options",), edit=change_options),
    Trap("options-of-parameter-rescaled", FAMILY, OptionsOfParameter, "either", ("options",), edit=rescale_options),
    Trap(
        "options-of-parameter-rescaled-late",
        FAMILY,
        OptionsOfParameter,
        "either",
        ("options",),
        steps=7,
        edit=rescale_options_late,
    ),
    # A new plan is made for other reasons, too, and the attributes are looked at there.
    *(
        Trap(f"options-of-parameter-{name}", FAMILY, OptionsOfParameter, "either", ("options",), edit=edit)
        for name, edit in (
            ("explained", give_options_after_explaining),
            ("and-rates", give_options_with_rates),
            ("loaded", give_options_after_loading),
        )
    ),
    Trap("known-by-id", FAMILY, KnownById, "either", ("special",)),
    # A DTensor has no address: all of them say 0.
    Trap("known-by-address", FAMILY, KnownByAddress, "either", ("special",), layouts=(PLAIN, DDP)),
    Trap("known-in-set", FAMILY, KnownInSet, "either", ("special",)),
    Trap("known-as-attribute", FAMILY, KnownAsAttribute, "either", ("special",)),
    Trap("scales-by-id", FAMILY, ScalesById, "either", ("special",)),
    Trap("scales-by-parameter", FAMILY, ScalesByParameter, "either", ("special",)),
    Trap("scales-by-weak-reference", FAMILY, ScalesByWeakReference, "either", ("special",)),
)
