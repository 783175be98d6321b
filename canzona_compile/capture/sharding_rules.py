"""Can the optimizer's own step run on DTensors? torch has sharding rules for most operators, not for all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from canzona_compile.capture.blame import blamed, first_line
from canzona_compile.capture.randomness import undisturbed
from canzona_compile.capture.twin import make_twin, step_plainly


def missing_rule(optimizer: Optimizer, group: Mapping[str, Any], param: DTensor) -> str:
    """Take two steps of a small parameter like this one. No collective, if the work is elementwise.

    Returns:
        What torch says of the operator that it has no rule for; nothing if it knows all of them.
    """
    own = param._local_tensor
    shape = tuple(max(1, min(n, 2)) for n in own.shape)
    small = [
        DTensor.from_local(
            torch.ones(shape, dtype=dtype, device=own.device), param.device_mesh, param.placements, run_check=False
        )
        for dtype in (param.dtype, param.dtype if param.grad is None else param.grad.dtype)
    ]
    like = torch.nn.Parameter(small[0])
    if small[1].dtype != like.dtype:
        like.grad_dtype = small[1].dtype
    like.grad = small[1]
    twin = make_twin(optimizer, group, [like])
    try:
        with undisturbed(own.device):
            step_plainly(twin)
            step_plainly(twin)
    except Exception as error:  # whatever it is: on whole tensors the step may work
        return f"torch cannot run its step on shards: {first_line(error)}{blamed(error)}"
    return ""
