"""The step of all parameters at once, for optimizers whose update of one parameter depends on others.

Prodigy divides sums over all parameters, others clip by a global norm. What a step does to a parameter by itself is not
defined then, so one rank has to see all of them. It steps a twin of the optimizer that holds whole parameters. What the
step leaves in parameter groups and attributes belongs to every rank.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from canzona_compile.capture.external_counters import around
from canzona_compile.capture.twin import make_twin, step_plainly
from canzona_compile.ir.layout import Shape

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.Size)


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


class NotPlain(Exception):
    """A step changes what other ranks cannot be shown; the message says what."""


# What a step changed: attributes, entries of the state that belong to no parameter, and each parameter group.
Changes = list[dict[Any, Any]]


def step_at_once(
    optimizer: Optimizer,
    params: Sequence[Sequence[Tensor]],
    state: Mapping[Tensor, dict[str, Any]],
    known: Collection[str] = (),
) -> Changes:
    """Step whole parameters on a twin of an optimizer. Parameters and state change in place.

    Args:
        optimizer: the optimizer, whose parameter groups and attributes stay as they are, but for what is in them.
        params: by parameter group, the whole parameters with their gradients.
        state: by parameter, its state.
        known: attributes and hyperparameters that steps change, perhaps in place.

    Returns:
        What the step changed beside parameters and their state.
    """
    twin = make_twin(optimizer, {}, [], state)
    pairs = zip(optimizer.param_groups, params, strict=True)
    twin.param_groups = [{**group, "params": list(own)} for group, own in pairs]
    before = [dict(values) for _, values in around(twin)]
    step_plainly(twin)
    for param, own in state.items():
        own.update(twin.state[param])
    return [
        {k: v for k, v in values.items() if k in known or k not in old or old[k] is not v}
        for old, (_, values) in zip(before, around(twin), strict=True)
    ]


def show(changes: Changes, optimizer: Optimizer) -> None:
    """Give an optimizer what a step changed. Tensors that it has already keep their place.

    Args:
        changes: what `step_at_once` returned.
        optimizer: gets it.
    """
    homes: list[dict[Any, Any]] = [vars(optimizer), optimizer.state, *optimizer.param_groups]
    made: dict[int, Any] = {}  # one tensor may be in several groups
    for home, changed in zip(homes, changes, strict=True):
        for key, value in changed.items():
            if id(value) not in made:
                made[id(value)] = put_into(home.get(key), value)
            home[key] = made[id(value)]


def put_into(there: Any, value: Any) -> Any:
    """Copy a tensor into one that is like it; return that one, or else the value."""
    if not isinstance(there, Tensor) or not isinstance(value, Tensor) or there is value:
        return value
    if (there.shape, there.dtype, there.device) != (value.shape, value.dtype, value.device):
        return value
    return there.copy_(value)


def check_plain(value: Any, place: str) -> None:
    """Raise unless a value is made of tensors, numbers and texts, in containers.

    Raises:
        NotPlain: it is not.
    """
    if isinstance(value, nn.Parameter) or not isinstance(value, (Tensor, *PLAIN, list, tuple, dict, set, frozenset)):
        raise NotPlain(f"it changes {place}, where it keeps {type(value).__name__} objects")
    entries = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    for entry in entries:
        check_plain(entry, place)


def check_shown(changes: Changes) -> None:
    """Raise if other ranks cannot be shown what a step changed.

    Raises:
        NotPlain: something in it is more than tensors, numbers and texts.
    """
    for home, changed in zip(["self.", "self.state of ", *["the group's "] * len(changes)], changes, strict=False):
        for key, value in changed.items():
            check_plain(value, f"{home}{key}")


def whole_copy(param: Tensor, grad: Tensor, marks: Mapping[str, Any]) -> nn.Parameter:
    """Make a whole parameter that steps, with memory of its own.

    Args:
        param: its values; they are copied.
        grad: its gradient; it is copied.
        marks: the attributes that users gave to it.
    """
    own = nn.Parameter(param.detach().clone(memory_format=torch.contiguous_format))
    if grad.dtype != param.dtype:
        own.grad_dtype = grad.dtype
    vars(own).update(marks)
    own.grad = grad.detach().clone(memory_format=torch.contiguous_format)
    return own


def absent(shape: Shape, dtype: torch.dtype, device: torch.device, marks: Mapping[str, Any]) -> nn.Parameter:
    """Make what stands for a whole parameter that has no gradient: its values are not there, and take no memory."""
    made = nn.Parameter(torch.zeros((), dtype=dtype, device=device).expand(shape))
    vars(made).update(marks)
    return made
