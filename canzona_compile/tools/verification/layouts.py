"""How ranks share a model: the layouts that tools know, in one table, and how gradients come to each part."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import cycle
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement
from torch.optim import Optimizer

from canzona_compile.api.wrap import wrap
from canzona_compile.api.zero1 import zero1
from canzona_compile.tools.verification.user_model import Built

LayoutName = Literal["fsdp", "fsdp_columns", "hsdp", "ddp", "zero1"]  # what users may choose


@dataclass(frozen=True, slots=True)
class SharedBy:
    """How some ranks share parameters.

    Attributes:
        outer: the sizes of all dims of the mesh but the last, whose size is what is left of the ranks.
        turns: the placements of the parameters, by turns. They are for the last dims of the mesh: ranks that differ in
            the others only have equal copies, or know nothing of one another. Without any, parameters are plain.
        replicated: whether ranks have equal copies of which the parameters do not tell.
    """

    words: str
    outer: tuple[int, ...] = ()
    turns: tuple[tuple[Placement, ...], ...] = ()
    replicated: bool = False


LAYOUTS: Mapping[str, SharedBy] = {
    "whole": SharedBy("with whole tensors"),
    "fsdp": SharedBy("with rows sharded", turns=((Shard(0),),)),
    "fsdp_columns": SharedBy("with columns sharded", turns=((Shard(1),),)),
    "hsdp": SharedBy("with rows sharded in each of two replicas", (2,), ((Replicate(), Shard(0)),)),
    "tp": SharedBy("with rows or columns sharded by turns", turns=((Shard(0),), (Shard(1),))),
    "tp_ddp": SharedBy(
        "with rows or columns sharded by turns in each of two replicas", (2,), ((Shard(0),), (Shard(1),)), True
    ),
    "both_dims": SharedBy("with rows and columns sharded", (2,), ((Shard(0), Shard(1)),)),
    "ddp": SharedBy("with equal copies on all ranks", replicated=True),
    # Pipeline stages. Ranks of one half make process groups of which the other half does not know.
    "stages": SharedBy("with rows and columns sharded within each half of the ranks", (2, 2), ((Shard(0), Shard(1)),)),
}


@cache
def mesh_of(device: str, shape: tuple[int, ...]) -> DeviceMesh:
    """One mesh per shape for the life of a rank: every mesh makes process groups."""
    return init_device_mesh(device, shape, mesh_dim_names=tuple("abc"[: len(shape)]))


def share(made: Built, layout: str, options: Mapping[str, Any], device: str = "cpu") -> None:
    """Share a model among the ranks of the default process group, and wrap its optimizer.

    Unless options say otherwise, rates are assumed, so that verdicts are of one plan on all machines.

    Args:
        device: the kind of device that the model is on.
    """
    options = {"hardware": "assumed", **options}
    if layout == "zero1":
        assert dist.group.WORLD is not None
        zero1(made.model, made.optimizer, mesh=dist.group.WORLD, **options)
    else:
        wrap(made.optimizer, replicate=shard(made.optimizer, layout, device), **options)


def shard(optimizer: Optimizer, layout: str, device: str = "cpu") -> DeviceMesh | dist.ProcessGroup | None:
    """Replace an optimizer's parameters by shards, as `fully_shard` does with those of a model.

    Groups keep their order, options and names, and state that exists already follows its parameter. A parameter without
    dims stays as it is: `fully_shard` takes it only as one of its `ignored_params`.

    Args:
        layout: a name of `LAYOUTS`: how the ranks of the default process group share each parameter.
        device: the kind of device that the parameters are on.
    """
    how = LAYOUTS[layout]
    if not how.turns:
        return dist.group.WORLD if how.replicated else None
    mesh = mesh_of(device, (*how.outer, dist.get_world_size() // math.prod(how.outer)))
    names = mesh.mesh_dim_names or ()
    inner = names[-len(how.turns[0]) :]
    own = mesh if inner == names else mesh[inner]
    for group in optimizer.param_groups:
        pairs = zip(group["params"], cycle(how.turns), strict=False)
        group["params"] = [sharded(optimizer, p, own, placements) if p.ndim else p for p, placements in pairs]
    return mesh[names[0]] if how.replicated else None


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


def give(
    params: Mapping[str, Tensor], grads: Mapping[str, Tensor], change: Callable[[Tensor], Tensor] = lambda grad: grad
) -> None:
    """Give each parameter the gradient of its name, laid out as the parameter is; None where there is none.

    Args:
        grads: whole gradients, equal on all ranks.
    """
    for name, param in params.items():
        param.grad = like(change(grads[name]), param) if name in grads else None


def give_by_backward(params: Mapping[str, Tensor], grads: Mapping[str, Tensor]) -> None:
    """Give plain parameters their gradients by a backward pass, as ZeRO-1 takes them.

    Ranks average their gradients. The mean of equal ones may round; that of a multiple and zeros does not, if the
    number of ranks is a power of two.
    """
    give(params, {})
    ranks, first = dist.get_world_size(), dist.get_rank() == 0
    shares = [grad * ranks if first else torch.zeros_like(grad).copysign(grad) for grad in grads.values()]
    torch.autograd.backward([params[name] for name in grads], shares)
