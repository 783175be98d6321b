"""Distributed optimizers as their own pages recommend to call them, each with its plain form, for `verify(as_is=True)`.

`build` makes both: the plain optimizer of a whole model without a mesh, the distributed one with it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Muon

import canzona_compile
from canzona_compile.optimizers import SOAP
from canzona_compile.tools.verification.layouts import like
from canzona_compile.tools.verification.steps_as_is import mesh_for

LR = 0.02
SHAPES = {  # rows and columns: shards of equal size on 2 and 4 ranks, unequal ones, and ranks without any
    "even": ((16, 24), (24, 16), (32, 8), (16, 24)),
    "uneven": ((31, 17), (7, 12), (10, 6), (31, 17)),
    "empty": ((1, 8), (3, 17), (2, 12), (3, 17)),
}
ALL = "all"  # of them, in one model
VERIFY_LAYOUT: dict[str, Any] = {
    "fsdp": "fsdp",
    "hsdp": "hsdp",
    "tp": "fsdp_columns",
    "ddp": "ddp",
}  # which name the dims of the mesh
FIRST = 3  # steps before a checkpoint
Make = Callable[[nn.Module, DeviceMesh | None], Any]


@dataclass(frozen=True, slots=True)
class Rival:
    """A distributed optimizer.

    Attributes:
        make: makes it for a model on a mesh, or its plain form if there is no mesh.
        layouts: those that its page claims.
        package: what has to be imported; a row says so where it cannot be.
        promise: what its page says of results, in our words.
        source: where that stands.
        why_not: why it cannot be tried here; empty if it can.
    """

    name: str
    make: Make
    layouts: Sequence[str]
    package: str
    promise: str
    source: str
    why_not: str = ""


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return list(model.parameters())


def torch_muon(model: nn.Module, mesh: DeviceMesh | None) -> Any:
    return Muon(matrices(model), lr=LR)


def zero_redundancy(model: nn.Module, mesh: DeviceMesh | None) -> Any:
    if mesh is None:
        return Muon(matrices(model), lr=LR)
    return ZeroRedundancyOptimizer(matrices(model), optimizer_class=Muon, lr=LR)


def as_written(function: Any = None, **options: Any) -> Any:
    """In the place of torch.compile: Inductor would take minutes on a CPU, in every process."""
    return function if function is not None else as_written


def dion(name: str, **options: Any) -> Make:
    """One of dion's optimizers: with the mesh of shards under FSDP2, with the process group under DDP.

    What it has under torch.compile runs as written, in both forms.
    """

    def make(model: nn.Module, mesh: DeviceMesh | None) -> Any:
        with mock.patch.object(torch, "compile", as_written):
            kind = getattr(importlib.import_module("dion"), name)
        groups = [{"params": matrices(model)}]
        if mesh is None:
            return kind(groups, lr=LR, **options)
        own: Any = mesh["shard"] if mesh.ndim == 2 else mesh
        if isinstance(model, DistributedDataParallel):
            own = model.process_group
        return kind(groups, lr=LR, distributed_mesh=own, **options)

    return make


def shampoo(strategy: str = "DEFAULT") -> Make:
    """Meta's Distributed Shampoo with Adam's step size, as in its page, refreshed every second step."""

    def make(model: nn.Module, mesh: DeviceMesh | None) -> Any:
        own: Any = importlib.import_module("distributed_shampoo")
        config: dict[str, Any] = {}
        if isinstance(model, DistributedDataParallel):
            config = {"distributed_config": own.DDPDistributedConfig(communication_dtype=torch.float32)}
        elif mesh is not None:
            types: Any = importlib.import_module("distributed_shampoo.shampoo_types")
            assigned = {"param_assignment_strategy": types.FSDPParamAssignmentStrategy[strategy]}
            if mesh.ndim == 2:
                config = {"distributed_config": own.HybridShardDistributedConfig(device_mesh=mesh, **assigned)}
            else:
                config = {"distributed_config": own.FullyShardDistributedConfig(**assigned)}
        return own.DistributedShampoo(
            model.parameters(),
            lr=0.001,
            betas=(0.9, 0.999),
            epsilon=1e-12,
            weight_decay=1e-05,
            max_preconditioner_dim=8192,
            precondition_frequency=2,
            grafting_config=own.AdamPreconditionerConfig(beta2=0.999, epsilon=1e-12),
            **config,
        )

    return make


def ours(kind: Callable[..., Any]) -> Make:
    """Wrapped, whatever the layout."""

    def make(model: nn.Module, mesh: DeviceMesh | None) -> Any:
        optimizer = kind(model.named_parameters(), lr=LR)
        if mesh is None:
            return optimizer
        replicate = mesh if isinstance(model, DistributedDataParallel) else None
        return canzona_compile.wrap(optimizer, replicate=replicate, strategy="owner")

    return make


DION = "https://github.com/microsoft/dion/blob/0a059a4"
META = "https://github.com/facebookresearch/optimizers/blob/f606606/distributed_shampoo/README.md"
TORCH = "https://docs.pytorch.org/docs/2.13"
EVERY = ("fsdp", "hsdp", "tp", "ddp")
LOCAL = "blocks of preconditioners are made of what a rank holds"
MUONS = "FSDP2, HSDP and DDP; no TP"
DION_ON = ("fsdp", "hsdp", "ddp")
RIVALS = {
    rival.name: rival
    for rival in (
        Rival("canzona_compile, Muon", ours(Muon), EVERY, "canzona_compile", "the bits of the plain optimizer", ""),
        Rival("canzona_compile, SOAP", ours(SOAP), EVERY, "canzona_compile", "the bits of the plain optimizer", ""),
        Rival("torch Muon", torch_muon, EVERY, "torch", "none", f"{TORCH}/generated/torch.optim.Muon.html"),
        Rival(
            "torch ZeroRedundancyOptimizer, Muon",
            zero_redundancy,
            ("ddp",),
            "torch",
            "shards state; each rank updates its own parameters",
            f"{TORCH}/distributed.optim.html",
        ),
        Rival("dion Muon", dion("Muon"), DION_ON, "dion", MUONS, f"{DION}/README.md#optimizers"),
        Rival(
            "dion NorMuon",
            dion("NorMuon"),
            DION_ON,
            "dion",
            f"{MUONS}; under FSDP its rescale is of local shards",
            f"{DION}/README.md#per-block-newton-schulz-for-fused-qkv-projections",
        ),
        Rival(
            "dion Dion2",
            dion("Dion2"),
            DION_ON,
            "dion",
            f"{MUONS}; by default its bits depend on the number of ranks",
            f"{DION}/CHANGELOG.md",
        ),
        Rival(
            "dion Dion2, global",
            dion("Dion2", selection_scope="global"),
            DION_ON,
            "dion",
            "the same selection in any layout",
            f"{DION}/CHANGELOG.md",
        ),
        Rival(
            "Meta Shampoo",
            shampoo(),
            ("fsdp", "hsdp", "ddp"),
            "distributed_shampoo",
            LOCAL,
            f"{META}#fsdp2-training-support",
        ),
        Rival(
            "Meta Shampoo, REPLICATE",
            shampoo("REPLICATE"),
            ("fsdp", "hsdp"),
            "distributed_shampoo",
            "lossless: preconditioners are those of whole parameters",
            f"{META}#fsdp2-training-support",
        ),
    )
}
NOT_TRIED = {
    "Meta Shampoo, ROUND_ROBIN": "its all-to-all has blocks of several sizes, which gloo refuses",
    "muonium 0.2.0": "it asserts that tensors are on CUDA",
    "Motif Parallel Muon": "it uses CUDA streams on every path",
    "Megatron-core LayerShardedMuon": "its engine needs CUDA",
    "torchtitan DistMuon": "FlexShard takes CUDA meshes",
    "dmuon": "on the CPU it stops because torch is not compiled with CUDA",
}


def shapes_of(name: str) -> Sequence[tuple[int, int]]:
    """Rows and columns by name."""
    return [shape for shapes in SHAPES.values() for shape in shapes] if name == ALL else SHAPES[name]


def build(mesh: DeviceMesh | None, rival: str, layout: str, shapes: str) -> tuple[nn.Module, Any]:
    """The model and the optimizer: plain without a mesh, else distributed."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(*(nn.Linear(columns, rows, bias=False) for rows, columns in shapes_of(shapes)))
    if mesh is not None:
        model = sharded(model, layout, mesh)
    return model, RIVALS[rival].make(model, mesh)


def sharded(model: nn.Module, layout: str, mesh: DeviceMesh) -> nn.Module:
    """The model in a layout, as torch itself offers it."""
    if layout == "ddp":
        return DistributedDataParallel(model, device_mesh=mesh)
    if layout == "tp":  # alternately by columns and by rows, as the two products of a feed-forward are
        for number, module in enumerate(model):  # type: ignore[arg-type, var-annotated]
            own = distribute_tensor(module.weight.detach(), mesh, [Shard(number % 2)], src_data_rank=None)
            module.weight = nn.Parameter(own)
        return model
    fully_shard(model, mesh=mesh)
    return model


# -- resumed on another number of ranks ------------------------------------------------------------


def step_first(model: nn.Module, optimizer: Any) -> None:
    """Take the first steps, with gradients that are the same in every layout."""
    random = torch.Generator().manual_seed(7)
    for _ in range(FIRST):
        for param in model.parameters():
            param.grad = like(torch.randn(param.shape, generator=random), param)
        optimizer.step()
    optimizer.zero_grad()


def save_first(rank: int, given: Mapping[str, str], to: str) -> None:
    """On each rank: train, and save the state as the optimizer's page says, else by torch's own calls."""
    model, optimizer = build(mesh_for(VERIFY_LAYOUT[given["layout"]]), **given)
    step_first(model, optimizer)
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        optimizer.consolidate_state_dict(to=0)
        if rank == 0:
            torch.save(optimizer.state_dict(), Path(to) / "state.pt")
        dist.barrier()
    else:
        state_dict_saver.save({"optimizer": state_of(model, optimizer)}, checkpoint_id=to)


def state_of(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """What is saved: by torch's call, or as Meta's page has it, by the optimizer's own."""
    if type(optimizer).__name__ == "DistributedShampoo":
        return dict(optimizer.state_dict())
    return get_optimizer_state_dict(model, optimizer)


def resumed(mesh: DeviceMesh | None, rival: str, layout: str, shapes: str, folder: str) -> tuple[nn.Module, Any]:
    """As `build`, after the first steps: the distributed optimizer has its state from the checkpoint.

    Parameters are those of the plain run, so that what is compared is the state.
    """
    whole, plain = build(None, rival, layout, shapes)
    step_first(whole, plain)
    if mesh is None:
        return whole, plain
    model, optimizer = build(mesh, rival, layout, shapes)
    with torch.no_grad():  # before the state: Meta's Shampoo gathers parameters anew when it loads
        for param, trained in zip(model.parameters(), whole.parameters(), strict=True):
            param.copy_(like(trained.detach(), param))
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        optimizer.load_state_dict(torch.load(Path(folder) / "state.pt", weights_only=False))
    else:
        part = {"optimizer": state_of(model, optimizer)}
        state_dict_loader.load(part, checkpoint_id=folder)
        if type(optimizer).__name__ == "DistributedShampoo":
            optimizer.load_state_dict(part["optimizer"])
        else:
            set_optimizer_state_dict(model, optimizer, part["optimizer"])
    return model, optimizer
