"""Counts what is handed to process groups: which collective, and the bytes that its cheapest algorithm sends."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Traffic(TorchDispatchMode):
    """While active, records (operator, bytes sent by this rank) of every collective in `calls`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.calls.append((func.overloadpacket.__name__, sent(func.overloadpacket.__name__, args)))
        return func(*args, **(kwargs or {}))

    def of(self, *names: str) -> list[int]:
        """The bytes of the calls of some operators."""
        return [count for name, count in self.calls if name in names]


def sent(name: str, args: tuple[Any, ...]) -> int:
    """The bytes that a rank sends: each of its elements once per rank that needs it, sums along a ring."""
    world = dist.get_world_size()
    tensors = [args[1] if name.startswith(("_reduce_scatter", "_allgather", "reduce_scatter", "alltoall")) else args[0]]
    while isinstance(tensors[0], list | tuple):
        tensors = [t for own in tensors for t in own]
    size = sum(t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor))
    if name == "_allgather_base_":
        return size * (world - 1)
    return size * (world - 1) // world
