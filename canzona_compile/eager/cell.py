"""Cells: whole parameters that one rank steps by the optimizer's own code, each by itself on a twin."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from canzona_compile.replica.twin import make_twin, step_plainly


def whole_copy(
    values: Tensor,
    grad: Tensor | None,
    attributes: Mapping[str, Any],
    requires_grad: bool = True,
    memory: torch.memory_format = torch.contiguous_format,
) -> nn.Parameter:
    """Make a whole parameter with memory of its own.

    Args:
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


def step_alone(optimizer: Optimizer, group: Mapping[str, Any], param: Tensor, state: dict[str, Any]) -> Tensor:
    """Step one whole parameter on a twin of an optimizer."""
    twin = make_twin(optimizer, group, [param], {param: state})
    step_plainly(twin)
    state.update(twin.state[param])
    return param.detach()
