"""Counts what a step hands to its process group, below everything that could miscount it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

NAMESPACES = ("c10d", "_c10d_functional", "_dtensor")
NO_TRAFFIC = ("wait_tensor", "_wrap_tensor_autograd", "barrier")


@dataclass(frozen=True, slots=True)
class Traffic:
    """Of one step: collectives that each rank takes part in, bytes that leave a rank, summed."""

    collectives: int
    bytes_sent: int


class TrafficCounter(TorchDispatchMode):
    """While active, sees the operators through which every collective reaches its process group.

    These are c10d's own (`torch.distributed` calls them) and the functional ones, which DTensor
    calls. Every group must be the one of all ranks. A collective counts what its cheapest algorithm
    sends: a ring for reductions, each fragment once to each other rank for gathers.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.collectives = 0
        self.bytes_sent = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor first: it calls the collectives
        name = func.overloadpacket.__name__
        if func.namespace in NAMESPACES and name not in NO_TRAFFIC:
            self.collectives += 1
            self.bytes_sent += SENT[name](args)
        return func(*args, **(kwargs or {}))

    def total(self) -> Traffic:
        """Over all ranks; a collective."""
        sent = torch.tensor(self.bytes_sent)
        dist.all_reduce(sent)
        return Traffic(self.collectives, int(sent))


def size(value: Any) -> int:
    """Bytes of a tensor or of a list of tensors."""
    tensors = [value] if isinstance(value, Tensor) else value
    return sum(t.numel() * t.element_size() for t in tensors)


def flat(lists: list[list[Tensor]]) -> list[Tensor]:
    return [tensor for tensors in lists for tensor in tensors]


def others() -> int:
    return dist.get_world_size() - 1


def split_bytes(tensor: Tensor, splits: list[int]) -> int:
    """Bytes of an all-to-all's input, cut by rows, that are for other ranks."""
    if not splits:
        return size(tensor) * others() // dist.get_world_size()
    return size(tensor[: sum(splits) - splits[dist.get_rank()]])


SENT: dict[str, Callable[[tuple[Any, ...]], int]] = {
    # torch.distributed: (output, input, group, ...), or (tensors, group, ...)
    "alltoall_base_": lambda args: split_bytes(args[1], args[4]),
    "_allgather_base_": lambda args: size(args[1]) * others(),
    "allgather_": lambda args: size(args[1]) * others(),
    "reduce_scatter_": lambda args: size(flat(args[1])) * others() // dist.get_world_size(),
    "broadcast_": lambda args: size(args[0]) * others() // dist.get_world_size(),  # of all ranks: size * others
    "_reduce_scatter_base_": lambda args: size(args[1]) * others() // dist.get_world_size(),
    "allreduce_": lambda args: 2 * size(args[0]) * others() // dist.get_world_size(),
    # functional: (input, ...)
    "all_to_all_single": lambda args: split_bytes(args[0], args[2]),
    "all_gather_into_tensor": lambda args: size(args[0]) * others(),
    "reduce_scatter_tensor": lambda args: size(args[0]) * others() // dist.get_world_size(),
    "all_reduce": lambda args: 2 * size(args[0]) * others() // dist.get_world_size(),
    "shard_dim_alltoall": lambda args: size(args[0]) * others() // dist.get_world_size(),
}
