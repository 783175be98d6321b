"""What users may give to `verify` with `as_is`: distributed optimizers that are right, wrong, late and broken."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Muon, Optimizer

import canzona_compile
from tests.tools.user_builds import net

Made = tuple[nn.Module, Any]
WIDTHS = (24, 33, 16)  # 33 rows, that two ranks share unevenly, and 16


def orthogonal(matrix: Tensor, sums: int = 1) -> Tensor:
    """Newton-Schulz in bfloat16, as Muon has it.

    Args:
        sums: how many parts each product is summed of.
    """
    x = matrix.bfloat16()
    x = x / x.norm().clamp(min=1e-7)

    def product(a: Tensor, b: Tensor) -> Tensor:
        parts = zip(a.tensor_split(sums, 1), b.tensor_split(sums, 0), strict=True)
        return torch.stack([left @ right for left, right in parts]).sum(0)

    for _ in range(5):
        gram = product(x, x.T)
        x = 3.4445 * x + product(-4.775 * gram + 2.0315 * product(gram, gram), x)
    return x


Change = Callable[[DTensor, int], Tensor]  # this rank's part of the change, from the gradient


class Orthogonalized(Optimizer):
    """Steps by orthogonalized gradients."""

    def __init__(self, params: Any, change: Any = None, lr: float = 2e-2) -> None:
        super().__init__(params, {"lr": lr})
        self.change, self.steps = change, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        for group in self.param_groups:
            for param in group["params"]:
                if isinstance(param, DTensor):
                    own = self.change(param.grad, self.steps)
                    param.to_local().sub_(own.to(param.dtype), alpha=group["lr"])
                else:
                    param.sub_(orthogonal(param.grad).to(param.dtype), alpha=group["lr"])


def gathered(grad: DTensor, step: int, sums: int = 1) -> Tensor:
    """The whole matrix on every rank, of which each keeps its part."""
    made = orthogonal(grad.full_tensor(), sums)
    return distribute_tensor(made, grad.device_mesh, grad.placements, src_data_rank=None).to_local()


def compiled(grad: DTensor, step: int) -> Tensor:
    """With sums in another order in a function that Dynamo refuses where there is a dispatch mode."""
    made = torch.compile(orthogonal, backend="eager", fullgraph=True)(grad.full_tensor(), 2)
    return distribute_tensor(made, grad.device_mesh, grad.placements, src_data_rank=None).to_local()


def scaled(grad: DTensor, step: int) -> Tensor:
    """From the third step on, one shape is 5% too long."""
    return gathered(grad, step) * (1.05 if step > 2 and grad.shape[0] == 16 else 1.0)


def uneven_skipped(grad: DTensor, step: int) -> Tensor:
    """The last rank forgets its part where it is smaller than the others."""
    found = gathered(grad, step)
    return found * 0 if found.shape[0] * dist.get_world_size() < grad.shape[0] else found


def blockwise(grad: DTensor, step: int) -> Tensor:
    """Each rank orthogonalizes what it has."""
    return orthogonal(grad.to_local())


def raises_on_one(grad: DTensor, step: int) -> Tensor:
    if dist.get_rank() == 1 and step == 2:
        raise ValueError("no such shard")
    return gathered(grad, step)


def hangs_on_one(grad: DTensor, step: int) -> Tensor:
    if dist.get_rank() == 1 and step == 2:
        time.sleep(600)
    return gathered(grad, step)


def dies_on_one(grad: DTensor, step: int) -> Tensor:
    if dist.get_rank() == 1:
        os._exit(3)
    return gathered(grad, step)


def build(mesh: DeviceMesh | None, change: Change = gathered) -> Made:
    model = net(*WIDTHS)
    if mesh is not None:
        fully_shard(model, mesh=mesh)
    return model, Orthogonalized(model.parameters(), change)


equal = partial(build, change=gathered)
wrong_scale = partial(build, change=scaled)
skips_uneven = partial(build, change=uneven_skipped)
by_blocks = partial(build, change=blockwise)
other_sums = partial(build, change=partial(gathered, sums=3))
compiled_sums = partial(build, change=compiled)
one_raises = partial(build, change=raises_on_one)
one_hangs = partial(build, change=hangs_on_one)
one_dies = partial(build, change=dies_on_one)


# -- real ones -------------------------------------------------------------------------------------


def muon_on_dtensors(mesh: DeviceMesh | None) -> Made:
    """Torch's, on rows that divide."""
    model = net(24, 32, 16)
    if mesh is not None:
        fully_shard(model, mesh=mesh)
    return model, Muon(model.parameters(), lr=2e-2)


def muon_on_uneven_dtensors(mesh: DeviceMesh | None) -> Made:
    model = net(24, 33, 1)
    if mesh is not None:
        fully_shard(model, mesh=mesh)
    return model, Muon(model.parameters(), lr=2e-2)


def wrapped(mesh: DeviceMesh | None) -> Made:
    model, optimizer = muon_on_uneven_dtensors(mesh)
    return model, optimizer if mesh is None else canzona_compile.wrap(optimizer)


def zero_redundancy(mesh: DeviceMesh | None) -> Made:
    model: nn.Module = net(*WIDTHS)
    if mesh is None:
        return model, Muon(model.parameters(), lr=2e-2)
    model = DistributedDataParallel(model)
    return model, ZeroRedundancyOptimizer(model.parameters(), Muon, lr=2e-2)


def hybrid(mesh: DeviceMesh | None) -> Made:
    """With a loss, which only the plain process calls, and a parameter without gradient."""
    model = net(*WIDTHS)

    def loss(model: nn.Module, step: int) -> Tensor:
        return model.get_submodule("0")(torch.full((4, 24), float(step))).square().sum()

    if mesh is None:
        return model, Muon(model.parameters()), loss  # type: ignore[return-value]
    assert mesh.mesh_dim_names == ("replicate", "shard")
    fully_shard(model, mesh=mesh)
    return model, canzona_compile.wrap(Muon(model.parameters()))


# -- bad ones --------------------------------------------------------------------------------------


def another_name(mesh: DeviceMesh | None) -> Made:
    model: nn.Module = net(*WIDTHS)
    model = nn.ModuleDict({"body": model}) if mesh is not None else model
    return model, Orthogonalized(model.parameters())


def another_shape(mesh: DeviceMesh | None) -> Made:
    model = net(*WIDTHS) if mesh is None else net(24, 17, 16)
    return model, Orthogonalized(model.parameters())


def another_start(mesh: DeviceMesh | None) -> Made:
    if mesh is not None:
        torch.manual_seed(5)
    return build(mesh)


def plain_raises(mesh: DeviceMesh | None) -> Made:
    if mesh is None:
        raise KeyError("no such layer")
    return build(mesh)


def plain_step_raises(mesh: DeviceMesh | None) -> Made:
    model = net(*WIDTHS)
    return model, Orthogonalized(model.parameters(), lr=None)  # type: ignore[arg-type]


def no_optimizer(mesh: DeviceMesh | None) -> Made:
    return net(*WIDTHS), 3
