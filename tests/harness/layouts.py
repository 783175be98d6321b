"""Parameters in every layout that the wrapper takes, made by torch's own parallelisms.

What a rank holds is not computed here but asked of torch: the same layout is given to a tensor that
counts its elements, and the fragment's numbers say which elements of any other tensor it holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import Placement

Values = Sequence[Tensor]


@dataclass(frozen=True, slots=True)
class Case:
    """A layout and the mesh for it. The mesh has as many ranks as there are; () is one process alone."""

    layout: str
    mesh: tuple[int, ...]

    @property
    def world(self) -> int:
        return math.prod(self.mesh)

    def __str__(self) -> str:
        return f"{self.layout}-{'x'.join(map(str, self.mesh)) or 'alone'}"


ALONE = Case("plain", ())  # one process without groups


class Net(nn.Module):
    """Independent linear layers. Called, it gives a scalar that depends on all of them."""

    def __init__(self, weights: Values) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        for weight in weights:
            layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
            layer.weight = nn.Parameter(weight.clone())
            self.layers.append(layer)

    def forward(self, inputs: Values) -> Tensor:
        outputs = [layer(x) for layer, x in zip(self.layers, inputs, strict=True)]
        return torch.stack([F.silu(y).square().sum() for y in outputs]).sum()

    def weights(self) -> list[nn.Parameter]:
        layers: list[Any] = list(self.layers)
        return [layer.weight for layer in layers]


@cache
def mesh_of(shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """One mesh per shape for the life of a rank: every mesh makes process groups."""
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def columns_where_even(ranks: int) -> Callable[[nn.Parameter], Shard | None]:
    """`shard_placement_fn` for Shard(1); fully_shard itself refuses to cut columns unevenly."""

    def placement(param: nn.Parameter) -> Shard | None:
        return Shard(1) if param.shape[1] % ranks == 0 else None

    return placement


def fsdp(values: Values, case: Case) -> list[nn.Parameter]:
    """Shard(0) by fully_shard, uneven and empty where rows do not suffice."""
    net = Net(values)
    fully_shard(net, mesh=mesh_of(case.mesh, ("dp",)))
    return net.weights()


def fsdp_columns(values: Values, case: Case) -> list[nn.Parameter]:
    """Shard(1) by fully_shard, Shard(0) where columns do not divide."""
    net = Net(values)
    placement = columns_where_even(case.world)
    fully_shard(net, mesh=mesh_of(case.mesh, ("dp",)), shard_placement_fn=placement)
    return net.weights()


def hsdp(values: Values, case: Case) -> list[nn.Parameter]:
    """(Replicate, Shard(0)) by fully_shard on a mesh of two dims."""
    net = Net(values)
    fully_shard(net, mesh=mesh_of(case.mesh, ("replicas", "shards")))
    return net.weights()


def tensor_parallel(net: Net, mesh: DeviceMesh, styles: Sequence[Any]) -> None:
    """Give layer i the style i; every rank cuts its own part of weights that are equal already."""
    plan = {f"layers.{i}": style for i, style in enumerate(styles)}
    parallelize_module(net, mesh, plan, src_data_rank=None)


def tp_rows(values: Values, case: Case) -> list[nn.Parameter]:
    """Shard(0) by ColwiseParallel: torch's linear layers hold [outputs, inputs]."""
    net = Net(values)
    tensor_parallel(net, mesh_of(case.mesh, ("tp",)), [ColwiseParallel()] * len(values))
    return net.weights()


def tp_columns(values: Values, case: Case) -> list[nn.Parameter]:
    """Shard(1) by RowwiseParallel, also uneven and empty."""
    net = Net(values)
    tensor_parallel(net, mesh_of(case.mesh, ("tp",)), [RowwiseParallel()] * len(values))
    return net.weights()


def alternating(values: Values) -> list[Any]:
    return [(ColwiseParallel, RowwiseParallel)[i % 2]() for i in range(len(values))]


def fsdp_tp(values: Values, case: Case) -> list[nn.Parameter]:
    """(_StridedShard(0), Shard(0)) and (Shard(0), Shard(1)) by turns: FSDP2 on top of TP."""
    mesh = mesh_of(case.mesh, ("dp", "tp"))
    net = Net(values)
    tensor_parallel(net, mesh["tp"], alternating(values))
    fully_shard(net, mesh=mesh["dp"])
    return net.weights()


def hsdp_tp(values: Values, case: Case) -> list[nn.Parameter]:
    """The same with replicas: a mesh of three dims."""
    mesh = mesh_of(case.mesh, ("replicas", "shards", "tp"))
    net = Net(values)
    tensor_parallel(net, mesh["tp"], alternating(values))
    fully_shard(net, mesh=mesh["replicas", "shards"])
    return net.weights()


def tp_ddp(values: Values, case: Case) -> list[nn.Parameter]:
    """DTensors of the tp mesh alone; equal copies along dp, which only replicate= can say."""
    mesh = mesh_of(case.mesh, ("dp", "tp"))
    net = Net(values)
    tensor_parallel(net, mesh["tp"], alternating(values))
    return net.weights()


def plain(values: Values, case: Case) -> list[nn.Parameter]:
    return [nn.Parameter(v.clone()) for v in values]


def placed(*placements: Placement) -> Callable[[Values, Case], list[nn.Parameter]]:
    """DTensors by distribute_tensor."""

    def build(values: Values, case: Case) -> list[nn.Parameter]:
        mesh = mesh_of(case.mesh, tuple("abc"[: len(case.mesh)]))
        parts = [distribute_tensor(v.clone(), mesh, placements, src_data_rank=None) for v in values]
        return [nn.Parameter(part) for part in parts]

    return build


def backwards(values: Values, case: Case) -> list[nn.Parameter]:
    """Shard(0) over a mesh whose ranks descend."""
    mesh = descending(case.world)
    parts = [distribute_tensor(v.clone(), mesh, [Shard(0)], src_data_rank=None) for v in values]
    return [nn.Parameter(part) for part in parts]


@cache
def descending(world: int) -> DeviceMesh:
    return DeviceMesh("cpu", list(reversed(range(world))))


def tp_alone(values: Values, case: Case) -> list[nn.Parameter]:
    """DTensors of the tp mesh whose copies along dp nobody mentions: every row works for itself."""
    return tp_ddp(values, case)


BUILDERS: dict[str, Callable[[Values, Case], list[nn.Parameter]]] = {
    "fsdp": fsdp,
    "fsdp_columns": fsdp_columns,
    "hsdp": hsdp,
    "tp_rows": tp_rows,
    "tp_columns": tp_columns,
    "fsdp_tp": fsdp_tp,
    "hsdp_tp": hsdp_tp,
    "tp_ddp": tp_ddp,
    "tp_alone": tp_alone,
    "backwards": backwards,
    "ddp": plain,
    "plain": plain,
    "replicated": placed(Replicate()),
    "both_dims": placed(Shard(0), Shard(1)),
    "replicated_rows": placed(Shard(0), Replicate()),
    "stack_dim0": placed(Shard(0)),
    "stack_dim1": placed(Shard(1)),
    "stack_dim2": placed(Shard(2)),
    "stack_dims": placed(Shard(0), Shard(1)),
}


def replicate_of(*cases: Case) -> DeviceMesh | dist.ProcessGroup | None:
    """What to tell `wrap` of replicas that parameters do not show."""
    for case in cases:
        if case.layout == "ddp":
            return dist.group.WORLD
        if case.layout == "tp_ddp":
            return mesh_of(case.mesh, ("dp", "tp"))["dp"]
    return None


class Laid:
    """Parameters of these values, dealt to one layout after the other, and the way from whole tensors to
    this rank's fragments of them."""

    def __init__(self, values: Values, *cases: Case) -> None:
        counted = [torch.arange(float(v.numel())).view(v.shape) for v in values]
        params: dict[int, nn.Parameter] = {}
        indices: dict[int, Tensor] = {}
        for k, case in enumerate(cases):
            build = BUILDERS[case.layout]
            own = range(k, len(values), len(cases))
            params.update(zip(own, build([values[i] for i in own], case), strict=True))
            numbers = build([counted[i] for i in own], case)
            indices.update(zip(own, (local(n).long() for n in numbers), strict=True))
        self.params = [params[i] for i in range(len(values))]
        self.indices = [indices[i] for i in range(len(values))]

    def fragment(self, whole: Tensor, i: int) -> Tensor:
        """This rank's part of a tensor shaped like parameter i."""
        return whole.flatten()[self.indices[i]]

    def like_param(self, whole: Tensor, i: int) -> Tensor:
        """A tensor shaped like parameter i, laid out as it is."""
        param, part = self.params[i], self.fragment(whole, i)
        if not isinstance(param, DTensor):
            return part
        mesh, placements = param.device_mesh, param.placements
        return DTensor.from_local(part, mesh, placements, run_check=False, shape=param.shape, stride=param.stride())


def local(tensor: Tensor) -> Tensor:
    """The fragment on this rank."""
    value: Any = tensor.detach()
    return value.to_local() if isinstance(value, DTensor) else value


def full(tensor: Tensor) -> Tensor:
    """The whole tensor, gathered by torch."""
    value: Any = tensor.detach()
    return value.full_tensor() if isinstance(value, DTensor) else value
