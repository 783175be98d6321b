"""Cells: whole parameters that one rank steps by the optimizer's own code.

A cell has two options: whose object steps, a twin of the user's or one that its class's constructor made
(`own_object`), and which parameters: one matrix, or all where they depend on one another. Prodigy divides sums over all
parameters, others clip by a global norm; what a step does to one of them by itself is not defined then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from canzona_compile.compat.interrupts import interrupts_later
from canzona_compile.compat.optimizer_class import plain_class
from canzona_compile.eager.publish import Homes, is_plain, objects_in, plain_homes
from canzona_compile.errors import UnsupportedOptimizer, some
from canzona_compile.replica.raised import NoCollectives
from canzona_compile.replica.snapshot import changed
from canzona_compile.replica.twin import make_twin, step_plainly


@dataclass(frozen=True, eq=False, slots=True)
class Left:
    """What a step left other than the values of parameters.

    Attributes:
        homes: all that is plain.
        same: by home, the keys at which there is the same object as before the step.
        state: by parameter that has one, its state.
    """

    homes: Homes
    same: list[set[Any]]
    state: dict[Tensor, dict[str, Any]]


def whole_copy(
    values: Tensor,
    grad: Tensor | None,
    attributes: Mapping[str, Any],
    requires_grad: bool = True,
    memory: torch.memory_format = torch.contiguous_format,
) -> nn.Parameter:
    """Make a whole parameter with memory of its own.

    Args:
        values: its values; they are copied.
        grad: its gradient, if it has one; it is copied.
        attributes: those that it gets, see `plain_attributes` and `carried`.
        requires_grad: whether it requires a gradient.
        memory: how both lie in memory; contiguous as what was gathered, unless it says otherwise.
    """
    made = values.detach().clone(memory_format=memory)
    own = nn.Parameter(made, requires_grad=requires_grad)
    vars(own).update(attributes)
    if grad is not None:
        if grad.dtype != values.dtype:
            own.grad_dtype = grad.dtype
        own.grad = grad.detach().clone(memory_format=memory)
    return own


def carried(param: Tensor) -> dict[str, Any]:
    """The attributes of a parameter that copies of all parameters have, too.

    Raises:
        UnsupportedOptimizer: one of these attributes is a DTensor.
    """
    check_no_fragments(param)
    return {k: v for k, v in vars(param).items() if is_plain(v) or not k.startswith("_")}


def step_alone(
    optimizer: Optimizer,
    group: Mapping[str, Any],
    param: Tensor,
    state: dict[str, Any],
    groups: Sequence[dict[str, Any]] = (),
) -> Tensor:
    """Step one whole parameter on a twin of an optimizer.

    Args:
        optimizer: the optimizer.
        group: the parameter group of the parameter.
        param: the parameter, with a gradient.
        state: its state, which gets the new one.
        groups: the groups of the twin, if it has others than one of this parameter alone.

    Returns:
        The new parameter.
    """
    twin = make_twin(optimizer, group, [param], {param: state})
    twin.param_groups = list(groups) or twin.param_groups
    step_plainly(twin)
    state.update(twin.state[param])
    return param.detach()


def step_all(optimizer: Optimizer, params: Sequence[Sequence[Tensor]], state: Mapping[Tensor, dict[str, Any]]) -> Left:
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
    before, objects = [dict(home) for home in plain_homes(twin)], objects_in(twin)
    with interrupts_later(), NoCollectives():
        step_plainly(twin)
    if places := changed(objects, objects_in(twin)):
        raise UnsupportedOptimizer(
            f"{plain_class(optimizer).__name__}.step changes {some(places)}, which cannot be sent to other ranks",
            hint="store only tensors, numbers and strings there, or lists and dicts of them",
        )
    after = plain_homes(twin)
    same = [{k for k, v in new.items() if k in old and old[k] is v} for old, new in zip(before, after, strict=True)]
    own = {param for group in params for param in group}
    kept = {key: entry for key, entry in twin.state.items() if isinstance(key, Tensor) and entry}
    if kept.keys() - own:
        raise UnsupportedOptimizer(
            f"{plain_class(optimizer).__name__}.step keeps state for tensors that are not parameters"
        )
    return Left(after, same, kept)


def check_no_fragments(param: Tensor) -> None:
    """Raise if an attribute of a parameter is a DTensor: one rank by itself would wait for others to read it.

    Raises:
        UnsupportedOptimizer: one is.
    """
    for name, value in vars(param).items():
        if isinstance(value, DTensor) and not name.startswith("_"):
            raise UnsupportedOptimizer(
                f"the optimizer steps all parameters at once on one rank, but the attribute {name} of this parameter "
                "is a DTensor, so each rank holds only a shard of it",
                hint=f"store it in self.state[param] instead of param.{name}",
            )
