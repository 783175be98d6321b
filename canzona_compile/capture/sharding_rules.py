"""Can the optimizer's own step run on DTensors? torch has sharding rules for most operators, not for all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from canzona_compile.capture.error_origin import blamed, first_line
from canzona_compile.capture.randomness import undisturbed
from canzona_compile.capture.twin import make_twin, step_plainly


def missing_rule(optimizer: Optimizer, group: Mapping[str, Any], param: DTensor) -> str:
    """Take two steps of a parameter like this one, which is thrown away. No collective, if the work is elementwise.

    It has the same shape, as rules may depend on whether shards are equal.

    Returns:
        What torch says of the operator that it has no rule for; nothing if it knows all of them.
    """
    like = torch.nn.Parameter(torch.zeros_like(param))
    dtype = param.dtype if param.grad is None else param.grad.dtype
    if dtype != param.dtype:
        like.grad_dtype = dtype
    like.grad = torch.ones_like(param, dtype=dtype)
    twin = make_twin(optimizer, group, [like])
    try:
        with undisturbed(param.device):
            step_plainly(twin)
            step_plainly(twin)
    except Exception as error:  # whatever it is: on whole tensors the step may work
        return f"torch cannot run its step on shards: {first_line(error)}{blamed(error)}"
    return ""
