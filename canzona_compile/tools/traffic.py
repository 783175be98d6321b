"""Counts what a step hands to its process groups, below everything that could miscount it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from canzona_compile.compat.torch_private import TorchDispatchMode, group_of_name, pytree

NAMESPACES = ("c10d", "_c10d_functional", "_dtensor")
NO_TRAFFIC = ("wait_tensor", "_wrap_tensor_autograd", "barrier")


@dataclass(frozen=True, slots=True)
class Traffic:
    """Of one step: collectives that each rank takes part in, bytes that leave a rank, summed."""

    collectives: int
    bytes_sent: int


class TrafficCounter(TorchDispatchMode):
    """While active, sees the operators through which every collective reaches its process group.

    These are c10d's own (`torch.distributed` calls them) and the functional ones, which DTensor calls. A collective
    counts what its cheapest algorithm sends: a ring for reductions, each fragment once to each other rank for gathers.

    Attributes:
        calls: how often each operator was called.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[str] = Counter()
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
            named = {one.name: value for one, value in zip(func._schema.arguments, args, strict=False)}
            self.calls[name.strip("_")] += 1
            self.bytes_sent += SENT.get(name, shared_out)(args, group_of({**named, **(kwargs or {})}))
        return func(*args, **(kwargs or {}))

    @property
    def collectives(self) -> int:
        return self.calls.total()

    def total(self) -> Traffic:
        """Over all ranks; a collective."""
        sent = torch.tensor(self.bytes_sent, device="cpu")
        dist.all_reduce(sent)
        return Traffic(self.collectives, int(sent))


def group_of(named: dict[str, Any]) -> dist.ProcessGroup:
    """The process group among the arguments of a collective: itself, in a box of TorchScript, or its name."""
    given = named["group_name"] if "group_name" in named else named.get("process_group")
    if isinstance(given, str):
        given = group_of_name(given)
    if isinstance(given, torch.ScriptObject):
        given = dist.ProcessGroup.unbox(given)
    group: dist.ProcessGroup | None = given if isinstance(given, dist.ProcessGroup) else dist.group.WORLD
    assert group is not None
    return group


def size(values: Any) -> int:
    """Bytes of a tensor, or of all tensors of a list, or of lists of them."""
    return sum(t.numel() * t.element_size() for t in pytree.tree_leaves(values) if isinstance(t, Tensor))


def shared_out(args: tuple[Any, ...], group: dist.ProcessGroup) -> int:
    """Bytes of one tensor, or one of each rank, that are for other ranks; of a broadcast this is the mean of ranks."""
    return size(args[0]) * (group.size() - 1) // group.size()


def split_bytes(tensor: Tensor, splits: list[int], group: dist.ProcessGroup) -> int:
    """Bytes of an all-to-all's input, cut by rows, that are for other ranks."""
    if not splits:
        return shared_out((tensor,), group)
    return size(tensor[: sum(splits) - splits[group.rank()]])


def reduced(args: tuple[Any, ...], group: dist.ProcessGroup) -> int:
    return 2 * size(args[0]) * (group.size() - 1) // group.size()


# Arguments of torch.distributed's operators: (output, input, group, ...), or (tensors, group, ...). Of functional ones:
# (input, ...). Those that are not here, such as broadcast, count as `shared_out`.
SENT: dict[str, Callable[[tuple[Any, ...], dist.ProcessGroup], int]] = {
    "alltoall_base_": lambda args, group: split_bytes(args[1], args[4], group),
    "alltoall_": lambda args, group: size(args[1][: group.rank()] + args[1][group.rank() + 1 :]),
    "_allgather_base_": lambda args, group: size(args[1]) * (group.size() - 1),
    "allgather_": lambda args, group: size(args[1]) * (group.size() - 1),
    "allgather_into_tensor_coalesced_": lambda args, group: size(args[1]) * (group.size() - 1),
    "reduce_scatter_": lambda args, group: shared_out(args[1:], group),
    "reduce_scatter_tensor_coalesced_": lambda args, group: shared_out(args[1:], group),
    "_reduce_scatter_base_": lambda args, group: shared_out(args[1:], group),
    "allreduce_": reduced,
    "allreduce_coalesced_": reduced,
    "gather_": lambda args, group: shared_out(args[1:], group),
    "scatter_": lambda args, group: shared_out(args[1:], group),
    "send": lambda args, group: size(args[0]),
    "recv_": lambda args, group: 0,
    "recv_any_source_": lambda args, group: 0,
    "all_to_all_single": lambda args, group: split_bytes(args[0], args[2], group),
    "all_gather_into_tensor": lambda args, group: size(args[0]) * (group.size() - 1),
    "all_gather_into_tensor_coalesced": lambda args, group: size(args[0]) * (group.size() - 1),
    "all_reduce": reduced,
    "all_reduce_coalesced": reduced,
}
