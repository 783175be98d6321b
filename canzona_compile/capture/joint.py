"""The step of all parameters at once, for optimizers whose update of one parameter depends on others.

Prodigy divides sums over all parameters, others clip by a global norm. What a step does to a parameter by itself is not
defined then, so one rank has to see all of them. It steps a twin of the optimizer that holds whole parameters. What
there is beside parameters and their state, in parameter groups and attributes, belongs to every rank; it has to be
plain, so that it can be sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from canzona_compile.capture.attributes import TORCH_S_OWN
from canzona_compile.capture.contents import Contents, Walk, changed
from canzona_compile.capture.no_collectives import NoCollectives
from canzona_compile.capture.twin import NOT_COPIED, hypers, make_twin, odd_state, plain_class, step_plainly
from canzona_compile.errors import UnsupportedOptimizer, some
from canzona_compile.progress.interrupts import interrupts_later

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.Size)
MOST_WATCHED = 1000  # places in attributes that cannot be sent; looking at them costs time on every step
Homes = list[dict[Any, Any]]  # attributes, entries of the state that belong to no parameter, and each parameter group


@dataclass(frozen=True, slots=True)
class JointUpdate:
    """What an optimizer does that steps all of its parameters at once.

    Attributes:
        reason: why it has to.
        hint: what its author can do about it.
        attributes: the attributes that its steps change.
        hyperparameters: the hyperparameters that they change.
    """

    reason: str
    hint: str = ""
    attributes: frozenset[str] = frozenset()
    hyperparameters: frozenset[str] = frozenset()

    def shows(self, other: JointUpdate | None) -> bool:
        """Whether ranks that show what this one changes show all that another one changes, for the same reason."""
        return (
            other is not None
            and (self.reason, self.hint) == (other.reason, other.hint)
            and self.attributes >= other.attributes
            and self.hyperparameters >= other.hyperparameters
        )


@dataclass(frozen=True, eq=False, slots=True)
class JointResult:
    """What a step left beside the values of parameters.

    Attributes:
        homes: all that is plain.
        same: by home, the keys at which there is the same object as before the step.
        state: by parameter that has one, its state.
    """

    homes: Homes
    same: list[set[Any]]
    state: dict[Tensor, dict[str, Any]]


def step_at_once(
    optimizer: Optimizer, params: Sequence[Sequence[Tensor]], state: Mapping[Tensor, dict[str, Any]]
) -> JointResult:
    """Step whole parameters on a twin of an optimizer. Parameters change in place, and so may their state.

    Args:
        optimizer: the optimizer. What is in its parameter groups and attributes may change in place.
        params: by parameter group, the whole parameters, with gradients where they have some.
        state: by parameter, its state, where there is one.

    Returns:
        What the step left.

    Raises:
        UnsupportedOptimizer: the step changed what cannot be sent to other ranks, or communicates.
    """
    twin = make_twin(optimizer, {}, [], {param: own for param, own in state.items() if own})
    pairs = zip(optimizer.param_groups, params, strict=True)
    twin.param_groups = [{**group, "params": list(own)} for group, own in pairs]
    before, objects = [dict(home) for home in homes_of(twin)], objects_in(twin)
    with interrupts_later(), NoCollectives():
        step_plainly(twin)
    if places := changed(objects, objects_in(twin)):
        raise UnsupportedOptimizer(
            f"{plain_class(optimizer).__name__}.step changes {some(places)}, which other ranks cannot be shown",
            hint="keep tensors, numbers and texts there, in lists and dicts",
        )
    after = homes_of(twin)
    same = [{k for k, v in new.items() if k in old and old[k] is v} for old, new in zip(before, after, strict=True)]
    own = {param for group in params for param in group}
    kept = {key: entry for key, entry in twin.state.items() if isinstance(key, Tensor) and entry}
    if kept.keys() - own:
        raise UnsupportedOptimizer(
            f"{plain_class(optimizer).__name__}.step keeps state of tensors that are no parameters"
        )
    return JointResult(after, same, kept)


def homes_of(optimizer: Optimizer) -> Homes:
    """What an optimizer holds beside parameters and their state, as far as it is plain."""
    found = [attributes_of(optimizer), odd_state(optimizer), *map(hypers, optimizer.param_groups)]
    return [{k: v for k, v in home.items() if is_plain(v)} for home in found]


def attributes_of(optimizer: Optimizer) -> dict[str, Any]:
    """The attributes of an optimizer that are its own."""
    return {k: v for k, v in vars(optimizer).items() if k not in NOT_COPIED and k not in TORCH_S_OWN}


def objects_in(optimizer: Optimizer) -> Contents:
    """What lies in all that is not plain, with tensors by version, and which keys there are."""
    walk = Walk(lambda value: "the optimizer" if value is optimizer else None, bits=False, most=MOST_WATCHED)
    homes = {"self": attributes_of(optimizer), "self.state": odd_state(optimizer)}
    homes |= {f"param_groups[{g}]": hypers(group) for g, group in enumerate(optimizer.param_groups)}
    for name, home in homes.items():
        for key, value in home.items():
            if not is_plain(value):
                walk.add(f"{name}.{key}", value)
    return walk.found


def is_plain(value: Any) -> bool:
    """Tell whether a value is made of tensors, numbers and texts, in containers."""
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(is_plain, value))
    if isinstance(value, dict):
        return all(map(is_plain, value)) and all(map(is_plain, value.values()))
    return type(value) is Tensor or isinstance(value, PLAIN)


def show(homes: Homes, same: Sequence[set[Any]], optimizer: Optimizer) -> None:
    """Give an optimizer what a step left on another one.

    Args:
        homes: all that is plain there.
        same: by home, the keys at which the step left the object that was there; here, too, that object stays.
        optimizer: gets it. What is plain here and not among it goes.
    """
    real: Homes = [vars(optimizer), optimizer.state, *optimizer.param_groups]
    for home, here, new, kept in zip(real, homes_of(optimizer), homes, same, strict=True):
        for key in here.keys() - new.keys():
            del home[key]
        for key, value in new.items():
            if key not in kept or key not in home or not refilled(home[key], value):
                home[key] = value


def refilled(there: Any, value: Any) -> bool:
    """Give a tensor or a container the contents of another one, if it can have them."""
    if there is value:
        return True
    if type(there) is not type(value):
        return False
    if isinstance(there, Tensor):
        fits = (there.shape, there.dtype, there.device) == (value.shape, value.dtype, value.device)
        if fits:
            with torch.no_grad():
                there.copy_(value)
        return fits
    if isinstance(there, list):
        there[:] = value
    elif isinstance(there, dict | set):
        there.clear()
        there.update(value)
    else:
        return False
    return True


def whole_copy(param: Tensor, grad: Tensor | None, origin: Tensor) -> nn.Parameter:
    """Make a whole parameter with memory of its own.

    Args:
        param: its values; they are copied.
        grad: its gradient, if it has one; it is copied.
        origin: the optimizer's own parameter, with the attributes that users gave to it.

    Raises:
        UnsupportedOptimizer: one of these attributes is a DTensor.
    """
    check_no_fragments(origin)
    made = param.detach().clone(memory_format=torch.contiguous_format)
    own = nn.Parameter(made, requires_grad=origin.requires_grad)
    vars(own).update({k: v for k, v in vars(origin).items() if is_plain(v) or not k.startswith("_")})
    if grad is not None:
        if grad.dtype != param.dtype:
            own.grad_dtype = grad.dtype
        own.grad = grad.detach().clone(memory_format=torch.contiguous_format)
    return own


def check_no_fragments(param: Tensor) -> None:
    """Raise if an attribute of a parameter is a DTensor: one rank by itself would wait for others to read it.

    Raises:
        UnsupportedOptimizer: one is.
    """
    for name, value in vars(param).items():
        if isinstance(value, DTensor) and not name.startswith("_"):
            raise UnsupportedOptimizer(
                f"the optimizer steps all parameters at once, on one rank, and the attribute {name} of a parameter is "
                "a DTensor, of which each rank holds a fragment",
                hint=f"keep what the step reads in self.state[param], not in param.{name}",
            )
