"""Where an optimizer holds what belongs to no single parameter: its attributes, its parameter groups, odd entries of
its state. Whoever copies, compares, watches or publishes an optimizer goes through these. Last, the optimizers that an
object holds.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from canzona_compile.compat.optimizer_class import plain_class
from canzona_compile.errors import some
from canzona_compile.replica.snapshot import ATOMS

# Where hooks of an optimizer are kept.
HOOKS = {
    f"_optimizer_{hook}_hooks"
    for hook in ("step_pre", "step_post", "state_dict_pre", "state_dict_post", "load_state_dict_pre")
} | {"_optimizer_load_state_dict_post_hooks"}
# Attributes of an optimizer that copies do not share: they are made again, or belong to the call of the real step.
NOT_COPIED = {"step", "canzona", "param_groups", "state", *HOOKS}
# Attributes that torch sets by itself while training.
TORCH_S_OWN = {"_opt_called", "_warned_capturable_if_run_uncaptured", "_zero_grad_profile_name", "_hook_for_profile"}


def copied_attributes(optimizer: Optimizer) -> dict[str, Any]:
    """The attributes of an optimizer that copies have, too."""
    return {name: value for name, value in vars(optimizer).items() if name not in NOT_COPIED}


def own_attributes(optimizer: Optimizer) -> dict[str, Any]:
    """The attributes of an optimizer that its class or its user has set; `defaults` are among them."""
    return {name: value for name, value in copied_attributes(optimizer).items() if name not in TORCH_S_OWN}


def atoms_of(optimizer: Optimizer) -> dict[str, Any]:
    """The attributes of an optimizer that are plain values."""
    return {k: v for k, v in own_attributes(optimizer).items() if isinstance(v, ATOMS)}


def odd_state(optimizer: Optimizer) -> dict[Any, Any]:
    """The entries of an optimizer's state whose keys are not parameters."""
    return {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}


def hypers(group: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter group without its parameters and their names."""
    return {k: v for k, v in group.items() if k not in ("params", "param_names")}


def signature(group: Mapping[str, Any], counters: Container[str] = ()) -> tuple[Any, ...]:
    """Return a key of the hyperparameters that may change graphs: not the values of floats, and no counters."""

    def shape(value: Any) -> Any:
        if isinstance(value, float):
            return "float", value == 0.0
        if isinstance(value, Tensor):
            return "tensor", tuple(value.shape), value.dtype, value.device.type
        if isinstance(value, list | tuple):
            return type(value).__name__, tuple(map(shape, value))
        if isinstance(value, dict):
            return "dict", tuple(sorted((str(k), shape(v)) for k, v in value.items()))
        if isinstance(value, int | str | bool | type(None)):
            return value
        return repr(value)

    return tuple(sorted((k, shape(v)) for k, v in hypers(group).items() if k != "initial_lr" and k not in counters))


def homes_of(optimizer: Optimizer) -> dict[str, dict[Any, Any]]:
    """All of these by place: "self", "self.state", and "param_groups[0]" and so on."""
    groups = {f"param_groups[{g}]": hypers(group) for g, group in enumerate(optimizer.param_groups)}
    return {"self": own_attributes(optimizer), "self.state": odd_state(optimizer), **groups}


def held_in(holder: object) -> dict[str, tuple[Optimizer, ...]]:
    """The optimizers in the attributes of an object, or in a dict, also in lists, tuples and dicts there, by name."""
    found: dict[str, tuple[Optimizer, ...]] = {}
    for name, value in (holder if isinstance(holder, dict) else getattr(holder, "__dict__", {})).items():
        entries: Iterable[Any] = value.values() if isinstance(value, dict) else value
        inside = entries if isinstance(value, list | tuple | dict) else (value,)
        if own := tuple(one for one in inside if isinstance(one, Optimizer)):
            found[name] = own
    return found


def advice(holder: Any) -> str:
    """Say how to wrap what an object holds, whose step cannot be replaced by those; empty if it holds none."""
    inner = held_in(holder)
    if not inner:
        return ""
    kind, places = plain_class(holder).__name__, some([f"self.{name}" for name in inner])
    if sum(map(len, inner.values())) == 1:
        return f"{kind} holds another optimizer: wrap that one, {places}, before you pass it in"
    return f"{kind} holds other optimizers: wrap each of them, {places}, before you pass them in"
