"""The layouts that `verify` knows: how the ranks share each parameter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement
from torch.optim import Optimizer

LayoutName = Literal["fsdp", "fsdp_columns", "hsdp", "ddp", "zero1"]


@dataclass(frozen=True, slots=True)
class VerifiedSharding:
    """How some ranks share a parameter.

    Attributes:
        mesh: the shape of the mesh for a number of ranks.
        placements: by dim of the mesh; empty if every rank has a plain copy.
    """

    mesh: Callable[[int], tuple[int, ...]]
    placements: tuple[Placement, ...]


SHARDINGS: dict[LayoutName, VerifiedSharding] = {
    "fsdp": VerifiedSharding(lambda ranks: (ranks,), (Shard(0),)),
    "fsdp_columns": VerifiedSharding(lambda ranks: (ranks,), (Shard(1),)),
    "hsdp": VerifiedSharding(lambda ranks: (2, ranks // 2), (Replicate(), Shard(0))),
    "ddp": VerifiedSharding(lambda ranks: (ranks,), ()),
}


def shard(optimizer: Optimizer, layout: LayoutName) -> dist.ProcessGroup | None:
    """Replace an optimizer's parameters by shards, as `fully_shard` does with those of a model. Not for "zero1".

    Groups keep their order, options and names, and state that exists already follows its parameter. A parameter without
    dims stays as it is: `fully_shard` takes it only as one of its `ignored_params`.

    Args:
        optimizer: plain, and the same on every rank.
        layout: how the ranks of the default process group share each parameter.

    Returns:
        What `wrap` has to be given as `replicate=`.
    """
    sharding = SHARDINGS[layout]
    if not sharding.placements:
        return dist.group.WORLD
    mesh = init_device_mesh("cpu", sharding.mesh(dist.get_world_size()))
    for group in optimizer.param_groups:
        group["params"] = [sharded(optimizer, p, mesh, sharding.placements) if p.ndim else p for p in group["params"]]
    return None


def sharded(optimizer: Optimizer, param: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> nn.Parameter:
    """The shard of one parameter, which takes the place of the whole one in the optimizer's state."""
    part = cut(param.detach(), mesh, tuple(fitting(p, param.ndim) for p in placements))
    made = nn.Parameter(part, requires_grad=param.requires_grad)
    if param in optimizer.state:
        state = optimizer.state.pop(param)
        alike = {k for k, v in state.items() if isinstance(v, Tensor) and v.shape == param.shape}
        optimizer.state[made] = {k: like(v, made) if k in alike else v for k, v in state.items()}
    return made


def fitting(placement: Placement, ndim: int) -> Placement:
    """The placement itself, or that of rows where a parameter has no columns."""
    return Shard(0) if isinstance(placement, Shard) and placement.dim >= ndim else placement


def cut(whole: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> DTensor:
    """This rank's fragment of a tensor that every rank has; no communication."""
    return distribute_tensor(whole, mesh, placements, src_data_rank=None)


def like(whole: Tensor, param: Tensor) -> Tensor:
    """A copy of a whole tensor, laid out as a parameter is."""
    return cut(whole, param.device_mesh, param.placements) if isinstance(param, DTensor) else whole.clone()


def fragments(found: object, whole: object) -> tuple[object, object]:
    """The part that a rank holds, and the same part of the whole; both unchanged where the whole has no such part."""
    if not isinstance(found, DTensor):
        return found, whole
    summed = any(isinstance(p, Partial) for p in found.placements)
    if summed or not isinstance(whole, Tensor) or whole.shape != found.shape:
        return found, whole
    return found.to_local(), cut(whole, found.device_mesh, tuple(found.placements)).to_local()
