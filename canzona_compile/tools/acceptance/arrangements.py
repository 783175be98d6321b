"""How the ranks of an acceptance run share parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.optim import Optimizer

from canzona_compile.tools.verification.layouts import sharded

# Replaces the parameters of a plain optimizer by this rank's part of them, on a kind of device; what `wrap` has to be
# given as `replicate=`.
Arrange = Callable[[Optimizer, str], DeviceMesh | dist.ProcessGroup | None]


@dataclass(frozen=True, slots=True)
class Arrangement:
    """A way to share parameters.

    Attributes:
        arrange: makes this rank's part of an optimizer's parameters.
        words: what ranks hold, in words that follow a noun.
    """

    arrange: Arrange
    words: str


@cache
def mesh_of(device: str, shape: tuple[int, ...]) -> DeviceMesh:
    """One mesh per shape for the life of a rank: every mesh makes process groups."""
    return init_device_mesh(device, shape, mesh_dim_names=tuple("abc"[: len(shape)]))


def place(optimizer: Optimizer, mesh: DeviceMesh, *placements: tuple[Placement, ...]) -> None:
    """Shard all parameters over a mesh, by these placements in turn."""
    for group in optimizer.param_groups:
        group["params"] = [
            sharded(optimizer, param, mesh, placements[i % len(placements)]) for i, param in enumerate(group["params"])
        ]


def whole(optimizer: Optimizer, device: str) -> None:
    """Leave plain tensors; every rank computes for itself."""


def fsdp(optimizer: Optimizer, device: str) -> None:
    """Shard rows, as FSDP2 does; unevenly where they do not divide."""
    place(optimizer, mesh_of(device, (dist.get_world_size(),)), (Shard(0),))


def fsdp_columns(optimizer: Optimizer, device: str) -> None:
    """Shard columns."""
    place(optimizer, mesh_of(device, (dist.get_world_size(),)), (Shard(1),))


def hsdp(optimizer: Optimizer, device: str) -> None:
    """Shard rows in two replicas."""
    place(optimizer, mesh_of(device, (2, dist.get_world_size() // 2)), (Replicate(), Shard(0)))


def tp(optimizer: Optimizer, device: str) -> None:
    """Shard columns and rows by turns, as tensor parallelism does."""
    place(optimizer, mesh_of(device, (dist.get_world_size(),)), (Shard(0),), (Shard(1),))


def tp_ddp(optimizer: Optimizer, device: str) -> DeviceMesh:
    """Tensor parallelism in two replicas, of which only `replicate=` tells."""
    mesh = mesh_of(device, (2, dist.get_world_size() // 2))
    place(optimizer, mesh["b"], (Shard(0),), (Shard(1),))
    return mesh["a"]


def both_dims(optimizer: Optimizer, device: str) -> None:
    """Shard rows over one axis and columns over the other, as FSDP on top of tensor parallelism does."""
    place(optimizer, mesh_of(device, (2, dist.get_world_size() // 2)), (Shard(0), Shard(1)))


def ddp(optimizer: Optimizer, device: str) -> dist.ProcessGroup | None:
    """Leave plain tensors, which are equal copies."""
    return dist.group.WORLD


def stages(optimizer: Optimizer, device: str) -> None:
    """Shard over both axes within a half of the ranks, a pipeline stage.

    Ranks of one half make process groups of which the other half does not know.
    """
    mesh = mesh_of(device, (2, 2, dist.get_world_size() // 4))
    place(optimizer, mesh["b", "c"], (Shard(0), Shard(1)))


ARRANGEMENTS: Mapping[str, Arrangement] = {
    "whole": Arrangement(whole, "with whole tensors"),
    "fsdp": Arrangement(fsdp, "with rows sharded"),
    "fsdp-columns": Arrangement(fsdp_columns, "with columns sharded"),
    "hsdp": Arrangement(hsdp, "with rows sharded in each of two replicas"),
    "tp": Arrangement(tp, "with rows or columns sharded by turns"),
    "tp-ddp": Arrangement(tp_ddp, "with rows or columns sharded by turns in each of two replicas"),
    "both-dims": Arrangement(both_dims, "with rows and columns sharded"),
    "ddp": Arrangement(ddp, "with equal copies on all ranks"),
    "stages": Arrangement(stages, "with rows and columns sharded within each half of the ranks"),
}
