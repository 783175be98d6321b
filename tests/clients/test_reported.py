"""What users of other optimizers reported as wrong, in layouts of their own: here each has the plain one's bits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Muon, Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import canzona_compile
from canzona_compile import optimizers
from canzona_compile.errors import CanzonaError
from tests.harness.beside import BesidePlain
from tests.harness.layouts import mesh_of
from tests.harness.marks import also
from tests.harness.pairs import same_bits
from tests.harness.published import imported
from tests.harness.ranks import run

STEPS = 4


def sharded(**options: Any) -> Any:
    torch.manual_seed(0)
    layers = [nn.Embedding(32, 24), nn.Linear(24, 24, bias=False), nn.GELU(), nn.Linear(24, 32, bias=False)]
    return fully_shard(nn.Sequential(*layers), **options)


def loss_of(model: Any, step: int, rank: int | None = None) -> Tensor:
    """On the data of this rank, or of another one."""
    rank = dist.get_rank() if rank is None else rank
    tokens = torch.randint(32, (16,), generator=torch.Generator().manual_seed(10 * step + rank))
    return nn.functional.cross_entropy(model(tokens).float(), (tokens + 1) % 32)


# -- loss scaling and clipping under FSDP2 -----------------------------------------------------------


def in_half_precision() -> tuple[list[str], list[float], Any]:
    """Step 1 overflows on the last rank alone."""
    model = sharded(mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float16))
    optimizer = canzona_compile.muon_adamw(model, lr=1e-2)
    scaler, scales = torch.amp.GradScaler("cpu", init_scale=1024.0), []
    with BesidePlain() as beside:
        for step in range(STEPS):
            loss = loss_of(model, step)
            if step == 1 and dist.get_rank() == dist.get_world_size() - 1:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
    assert beside.compared > 0
    return beside.finish(), scales, norm.full_tensor().isfinite().item()


def test_float16_with_a_scaler_and_a_norm() -> None:
    """All ranks leave out the step that one cannot take."""
    assert run(2, in_half_precision) == [([], [1024.0, 512.0, 512.0, 512.0], True)] * 2


# -- meshes that have nothing to do with one another -------------------------------------------------


def on_islands() -> list[str]:
    """Ranks 0 and 1 have experts of their own, ranks 2 and 3 others, under the same names and with other values."""
    own = [[0, 1], [2, 3]]
    groups = [dist.new_group(ranks) for ranks in own]
    island = dist.get_rank() // 2
    mesh = DeviceMesh.from_group(groups[island], "cpu", mesh=own[island], mesh_dim_names=("experts",))
    draw = torch.Generator().manual_seed(island)

    def laid(*shape: int) -> DTensor:
        return distribute_tensor(torch.randn(shape, generator=draw), mesh, [Shard(0)], src_data_rank=None)

    params = {"gate": nn.Parameter(laid(16, 12)), "experts": nn.Parameter(laid(4, 12, 8))}
    optimizer = canzona_compile.wrap(optimizers.Muon([*params.items()], lr=0.1))
    with BesidePlain() as beside:
        for _ in range(STEPS):
            for param in params.values():
                param.grad = laid(*param.shape)
            optimizer.step()
    return beside.finish()


def test_experts_on_meshes_that_share_no_rank() -> None:
    assert run(4, on_islands) == [[]] * 4


def with_a_group_per_mesh() -> list[str]:
    """Experts lie on the second dim of a mesh, all else on both: torch clips each group by itself."""
    mesh = mesh_of((2, 2), ("data", "experts"))
    draw = torch.Generator().manual_seed(0)

    def laid(shape: tuple[int, ...], on: DeviceMesh, *placements: Any) -> DTensor:
        return distribute_tensor(torch.randn(shape, generator=draw), on, placements, src_data_rank=None)

    lies: list[tuple[tuple[int, ...], DeviceMesh, tuple[Any, ...]]] = [
        ((16, 12), mesh, (Replicate(), Shard(0))),
        ((4, 12, 8), mesh["experts"], (Shard(0),)),
    ]
    params = [nn.Parameter(laid(shape, on, *at)) for shape, on, at in lies]
    optimizer = canzona_compile.wrap(optimizers.Muon([{"params": [param]} for param in params], lr=0.1))
    with BesidePlain() as beside:
        for _ in range(STEPS):
            for param, (shape, on, at) in zip(params, lies, strict=True):
                param.grad = laid(shape, on, *at)
                nn.utils.clip_grad_norm_([param], 1.0)
            optimizer.step()
    return beside.finish()


def test_a_group_per_mesh() -> None:
    assert run(4, with_a_group_per_mesh) == [[]] * 4


# -- shards without elements -------------------------------------------------------------------------


def with_empty_shards(flag: str) -> list[str]:
    """The last rank has nothing of the last parameters of the group."""
    mesh = mesh_of((3,), ("data",))
    draw = torch.Generator().manual_seed(0)

    def laid(shape: tuple[int, ...]) -> DTensor:
        return distribute_tensor(torch.randn(shape, generator=draw), mesh, [Shard(0)], src_data_rank=None)

    shapes = ((6, 32), (2, 32), (1, 32))  # fused kernels round the last elements otherwise, if these fill no vector
    params = [nn.Parameter(laid(shape)) for shape in shapes]
    optimizer = canzona_compile.wrap(AdamW(params, lr=0.1, **{flag: True}))
    with BesidePlain() as beside:
        for _ in range(STEPS):
            for param, shape in zip(params, shapes, strict=True):
                param.grad = laid(shape)
            optimizer.step()
    return beside.finish()


@pytest.mark.parametrize("flag", ["fused", *also(["foreach"])])
def test_empty_shards_come_last(flag: str) -> None:
    assert run(3, with_empty_shards, flag) == [[]] * 3


# -- stages and averages in data parallelism ---------------------------------------------------------


def in_stages(options: dict[str, Any]) -> list[bool]:
    """The last layer is trained first, then all; an average of the weights goes with it."""
    world = dist.group.WORLD
    torch.manual_seed(0)
    layers = [nn.Embedding(32, 24), nn.Linear(24, 24, bias=False), nn.GELU(), nn.Linear(24, 32, bias=False)]
    model = nn.Sequential(*layers)
    plain = copy.deepcopy(model)
    whole = canzona_compile.unwrap(canzona_compile.muon_adamw(plain, lr=1e-2))
    late = options.get("gather") == "forward"
    replicas = {"zero1": world, **options} if options else {"replicate": world}
    optimizer = canzona_compile.muon_adamw(model, lr=1e-2, **replicas)
    shell: Any = model if options else DistributedDataParallel(model, find_unused_parameters=True)
    averages = [AveragedModel(own, multi_avg_fn=get_ema_multi_avg_fn(0.5)) for own in (model, plain)]
    for own in (model, plain):
        own.requires_grad_(False)
        own[3].requires_grad_(True)
    for step in range(STEPS):
        if step == 2:
            model.requires_grad_(True)
            plain.requires_grad_(True)
        loss_of(shell, step).backward()
        for rank in range(dist.get_world_size()):
            (loss_of(plain, step, rank) / dist.get_world_size()).backward()
        for one in (optimizer, whole):
            one.step()
            one.zero_grad()
        if late:
            optimizer.canzona.synchronize()
        for average, own in zip(averages, (model, plain), strict=True):
            average.update_parameters(own)
    pairs = zip(*(average.parameters() for average in averages), strict=True)
    return [same_bits(one, two) for one, two in (*zip(model.parameters(), plain.parameters(), strict=True), *pairs)]


@pytest.mark.parametrize("options", [{}, {"gather": "step"}, {"gather": "forward"}], ids=["ddp", "zero1", "late"])
def test_layers_are_unfrozen_and_averaged(options: dict[str, Any]) -> None:
    assert run(2, in_stages, options) == [[True] * 6] * 2


# -- checkpoints -------------------------------------------------------------------------------------


def adamw(params: list[Any]) -> Optimizer:
    return AdamW(params, lr=1e-2)


def adamw_in_8_bits(params: list[Any]) -> Optimizer:
    made: Optimizer = imported("torchao.optim").AdamW8bit(params, lr=1e-2)
    return made


def built(other: Callable[[list[Any]], Optimizer]) -> tuple[Any, Any]:
    """Only the parameters of the first optimizer have names."""
    model = sharded()
    choice = canzona_compile.hidden_matrices(model)
    muon = canzona_compile.wrap(Muon(choice.matrices, lr=1e-2))
    return model, canzona_compile.chain(muon, other([param for _, param in choice.others]))


def trained(model: Any, optimizer: Any, *steps: int) -> None:
    for step in steps:
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def half_frozen() -> tuple[Any, Any]:
    """A stage of gradual unfreezing: only the last layer is trained."""
    model = sharded()
    optimizer = canzona_compile.muon_adamw(model, lr=1e-2)
    model.requires_grad_(False)
    model[3].requires_grad_(True)
    return model, optimizer


def saved_and_loaded(build: Callable[[], tuple[Any, Any]], folder: str) -> list[bool]:
    with torch.compiler.set_stance("force_eager"):  # torchao compiles its update for each shape
        model, optimizer = build()
        trained(model, optimizer, 0, 1)
        own, state = get_state_dict(model, optimizer)
        dcp.save({"model": own, "optimizer": state}, checkpoint_id=folder)
        model.requires_grad_(True)
        trained(model, optimizer, 2, 3)
        again, its = build()
        own, state = get_state_dict(again, its)
        dcp.load({"model": own, "optimizer": state}, checkpoint_id=folder)
        set_state_dict(again, its, model_state_dict=own, optim_state_dict=state)
        again.requires_grad_(True)
        trained(again, its, 2, 3)
    pairs = zip(model.parameters(), again.parameters(), strict=True)
    return [same_bits(one.full_tensor(), two.full_tensor()) for one, two in pairs]


@pytest.mark.parametrize("other", [adamw, *also([adamw_in_8_bits])], ids=["adamw", "torchao"])
def test_checkpoints_of_a_chain_with_names_for_one_optimizer(
    other: Callable[[list[Any]], Optimizer], tmp_path: Path
) -> None:
    if other is adamw_in_8_bits:
        imported("torchao.optim")
    assert run(2, saved_and_loaded, partial(built, other), str(tmp_path)) == [[True] * 3] * 2


def test_a_checkpoint_between_two_stages_of_unfreezing(tmp_path: Path) -> None:
    assert run(2, saved_and_loaded, half_frozen, str(tmp_path)) == [[True] * 3] * 2


def from_adamw(folder: str) -> list[bool]:
    """What AdamW trained and still trains goes on with its moments; what Muon takes over has none to begin with."""
    model: Any = sharded()
    plain = AdamW(model.parameters(), lr=1e-2)
    trained(model, plain, 0, 1)
    own, state = get_state_dict(model, plain)
    dcp.save({"model": own, "optimizer": state}, checkpoint_id=folder)
    again = sharded()
    optimizer = canzona_compile.muon_adamw(again, lr=1e-2)
    own, state = get_state_dict(again, optimizer)
    saved = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    kept = {
        name: leaves
        for name, leaves in state["state"].items()
        if all(f"optimizer.state.{name}.{leaf}" in saved for leaf in leaves)
    }
    dcp.load({"model": own, "optimizer": {"state": kept}}, checkpoint_id=folder)
    set_model_state_dict(again, own)
    options = StateDictOptions(strict=False)
    set_optimizer_state_dict(again, optimizer, {**state, "state": kept}, options=options)
    moments = [
        same_bits(plain.state[one][leaf].full_tensor(), optimizer.state[two][leaf].full_tensor())
        for one, two in zip(model.parameters(), again.parameters(), strict=True)
        for leaf in ("exp_avg", "exp_avg_sq")
        if leaf in optimizer.state.get(two, {})
    ]
    trained(again, optimizer, 2)
    return [*moments, len(kept) == 2]


def test_a_checkpoint_of_adamw_for_all(tmp_path: Path) -> None:
    assert run(2, from_adamw, str(tmp_path)) == [[True] * 5] * 2


def test_a_checkpoint_of_another_length_loads_nothing() -> None:
    params = [nn.Parameter(torch.randn(6, 4)) for _ in range(2)]
    longer = Muon([nn.Parameter(torch.randn(6, 4)) for _ in range(3)], lr=0.1).state_dict()
    optimizer = canzona_compile.wrap(Muon(params, lr=0.2))
    with pytest.raises((ValueError, CanzonaError), match="size of optimizer's group"):
        optimizer.load_state_dict(longer)
    assert optimizer.param_groups[0]["lr"] == 0.2
