"""Ways to spread one model over ranks: those that torch itself offers, and ZeRO-1 with and without torch's TP.

Nothing here knows of `canzona_compile`: it reads the layout off the parameters. Only where torch
leaves no trace of it, because the parameters are replicated plain tensors (DDP) or DTensors of the
tensor-parallel mesh alone, does the caller have to say so: `Parallel.replicate`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from lm_model import Decoder


@dataclass(frozen=True, slots=True)
class Parallel:
    """A model on this rank.

    Attributes:
        forward: what to call for the loss.
        data_rank: which part of each batch this rank sees.
        num_data_ranks: parts of a batch.
        replicate: what `canzona_compile.wrap` has to be told, if anything.
        average: ranks over which the backward pass leaves the gradients to be averaged, if any.
        zero1: the data-parallel ranks of `canzona_compile.zero1`, which takes the place of `wrap`; None for `wrap`.
        gather: when ZeRO-1 gathers parameters.
    """

    forward: nn.Module
    data_rank: int
    num_data_ranks: int
    replicate: DeviceMesh | None = None
    average: DeviceMesh | None = None
    zero1: DeviceMesh | None = None
    gather: str = "step"

    @property
    def options(self) -> dict[str, Any]:
        """What `canzona_compile.wrap` is told, or under ZeRO-1 `canzona_compile.zero1`."""
        return {"replicate": self.replicate} if self.zero1 is None else {"gather": self.gather}

    def finish_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Leave each gradient laid out like its parameter and averaged over all data."""
        gradients = []
        for parameter in parameters:
            gradient = parameter.grad
            if isinstance(parameter, DTensor) and isinstance(gradient, DTensor):
                # A norm that saw some of the heads: its gradient is still a sum over ranks.
                gradient = parameter.grad = gradient.redistribute(placements=parameter.placements)
            if gradient is not None:
                gradients.append(local(gradient))
        if self.average is not None:
            average(gradients, self.average)


def ddp(model: Decoder) -> Parallel:
    """Whole parameters on every rank."""
    mesh = make_mesh(model, (dist.get_world_size(),), "data")
    forward = DistributedDataParallel(model, process_group=mesh.get_group())
    return Parallel(forward, dist.get_rank(), dist.get_world_size(), replicate=mesh)


def fsdp(model: Decoder) -> Parallel:
    """Rows of every parameter on one rank each."""
    return sharded(model, make_mesh(model, (dist.get_world_size(),)))


def hsdp(model: Decoder) -> Parallel:
    """Two replicas, rows of every parameter spread within each."""
    mesh = make_mesh(model, two_by_half(), "replicate", "shard")
    return sharded(model, mesh)


def sharded(model: Decoder, mesh: DeviceMesh) -> Parallel:
    """Shard each block by itself, so that one block at a time is whole, then the rest."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return Parallel(model, dist.get_rank(), dist.get_world_size())


def tp(model: Decoder) -> Parallel:
    """Heads and hidden units split in two; the other ranks see other data."""
    data = tensor_parallel(model)["data"]
    return Parallel(model, data.get_local_rank(), data.size(), replicate=data, average=data)


def fsdp_tp(model: Decoder) -> Parallel:
    """Heads and hidden units split in two, and rows of what is left on one of the other ranks each."""
    data = tensor_parallel(model)["data"]
    sharded(model, data)
    return Parallel(model, data.get_local_rank(), data.size())


def tensor_parallel(model: Decoder) -> DeviceMesh:
    """Split heads and hidden units in two; returns the mesh of "data" and "tensor"."""
    ways, replicas = two_by_half()
    mesh = make_mesh(model, (replicas, ways), "data", "tensor")
    plan = {
        "attention.q_proj": ColwiseParallel(),
        "attention.k_proj": ColwiseParallel(),
        "attention.v_proj": ColwiseParallel(),
        # Not sequence parallelism: dim 2 of their input are the heads, of which a rank has some.
        "attention.q_norm": SequenceParallel(sequence_dim=2, use_local_output=True),
        "attention.k_norm": SequenceParallel(sequence_dim=2, use_local_output=True),
        "attention.o_proj": RowwiseParallel(),
        "feed_forward.gate_proj": ColwiseParallel(),
        "feed_forward.up_proj": ColwiseParallel(),
        "feed_forward.down_proj": RowwiseParallel(),
    }
    for block in model.blocks:
        parallelize_module(block, mesh["tensor"], plan)
    return mesh


def zero1(model: Decoder) -> Parallel:
    """Whole parameters on every rank; each matrix's gradient, state and update on one."""
    mesh = make_mesh(model, (dist.get_world_size(),), "data")
    return Parallel(model, dist.get_rank(), dist.get_world_size(), zero1=mesh)


def zero1_forward(model: Decoder) -> Parallel:
    """The same, and parameters are gathered by the forward pass that needs them."""
    return replace(zero1(model), gather="forward")


def zero1_tp(model: Decoder) -> Parallel:
    """Heads and hidden units split in two; ZeRO-1 over the other ranks."""
    made = tp(model)
    return Parallel(model, made.data_rank, made.num_data_ranks, zero1=made.replicate)


PARALLEL: dict[str, Callable[[Decoder], Parallel]] = {
    "fsdp": fsdp,
    "ddp": ddp,
    "tp": tp,
    "fsdp-tp": fsdp_tp,
    "hsdp": hsdp,
    "zero1": zero1,
    "zero1-forward": zero1_forward,
    "zero1-tp": zero1_tp,
}


def make_mesh(model: Decoder, shape: tuple[int, ...], *names: str) -> DeviceMesh:
    """Make a mesh of all ranks, on the device where the model is."""
    return init_device_mesh(model.cos.device.type, shape, mesh_dim_names=names or None)


def two_by_half() -> tuple[int, int]:
    """Shape a mesh of two rows."""
    ranks = dist.get_world_size()
    if ranks % 2:
        raise ValueError(f"tp, fsdp-tp, hsdp and zero1-tp split the ranks in two: {ranks} is odd")
    return 2, ranks // 2


def clip_gradients(parameters: Iterable[nn.Parameter], limit: float) -> float:
    """Scale all gradients so that their common norm is at most `limit`; return what it was.

    torch.nn.utils.clip_grad_norm_ stacks the norms, which fails where parameters of several meshes
    (here: plain ones and tensor-parallel ones) meet. So: a norm per mesh, then theirs.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    by_mesh: dict[DeviceMesh | None, list[Tensor]] = {}
    for gradient in gradients:
        mesh = gradient.device_mesh if isinstance(gradient, DTensor) else None
        by_mesh.setdefault(mesh, []).append(gradient)
    norms = [whole(torch.nn.utils.get_total_norm(group)) for group in by_mesh.values()]
    norm = float(torch.linalg.vector_norm(torch.stack(norms)))
    scale = min(1.0, limit / (norm + 1e-6))
    for gradient in gradients:
        gradient.mul_(scale)
    return norm


def average(tensors: list[Tensor], mesh: DeviceMesh) -> None:
    """Average tensors over a mesh in place, all in one collective."""
    bucket = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(bucket, group=mesh.get_group())
    bucket /= mesh.size()
    means = torch.split(bucket, [tensor.numel() for tensor in tensors])
    for tensor, mean in zip(tensors, means, strict=True):
        tensor.copy_(mean.view_as(tensor))


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """Return all of a tensor; a collective if it is sharded."""
    sharded: Any = tensor
    return sharded.full_tensor() if hasattr(tensor, "full_tensor") else tensor
