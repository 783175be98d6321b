"""Send Python values with tensors in them from one rank to others."""

from __future__ import annotations

import io
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from canzona_compile.compat.torch_private import pytree
from canzona_compile.ir.program_ops import Watch


def send_values(values: Any, source: int, group: dist.ProcessGroup, device: torch.device, watch: Watch) -> Any:
    """Send values from one rank to all ranks of a group. A collective.

    Args:
        values: on the source, what can be pickled; one tensor in several places stays one. Other ranks give anything.
        source: the global rank that sends.
        group: the group.
        device: the device of the group's communicator.
        watch: waits for collectives.

    Returns:
        The values; tensors that lie on a GPU there lie on `device` here.
    """
    here = dist.get_rank() == source
    data = packed(values) if here else torch.empty(0, dtype=torch.uint8, device="cpu")
    size = torch.tensor([data.numel()], device=device)
    watch.wait(dist.broadcast(size, source, group=group, async_op=True))
    data = data.to(device) if here else torch.empty(int(size), dtype=torch.uint8, device=device)
    watch.wait(dist.broadcast(data, source, group=group, async_op=True))
    return values if here else unpacked(data.cpu(), device)


def packed(values: Any) -> Tensor:
    """Write values as bytes. A view of a larger tensor is sent alone."""

    def alone(value: Any) -> Any:
        if isinstance(value, Tensor) and value.untyped_storage().nbytes() > value.numel() * value.itemsize:
            return value.clone()
        return value

    file = io.BytesIO()
    torch.save(pytree.tree_map(alone, values), file)
    return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)


def unpacked(data: Tensor, device: torch.device) -> Any:
    """Read what `packed` wrote."""

    def place(storage: Any, location: str) -> Any:
        return storage if location == "cpu" else storage.to(device=device)

    return torch.load(io.BytesIO(data.numpy().tobytes()), map_location=place, weights_only=False)
