"""The plan of a run under zero1 is the plan that is made offline."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import canzona_compile
from canzona_compile.errors import CanzonaError
from canzona_compile.ir.plan_file import PlanFile, read_plan
from tests.data_parallel.fused import GATE_UP, QKV, SPLITS, FusedModel, named
from tests.data_parallel.models import MAKERS, Block, Model
from tests.data_parallel.runs import compare, step_alone
from tests.harness.layouts import mesh_of
from tests.harness.marks import full
from tests.harness.mistakes import attempt
from tests.harness.model_pairs import zero1
from tests.harness.ranks import run

BUCKETS = 40_000  # bytes: several buckets, and embedding and head are cut


def plan_of_run(make: str, reverse: bool, options: dict[str, Any]) -> list[str]:
    """The plans of all optimizers of a run."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    model = Model()
    optimizers = MAKERS[make](model)
    made = canzona_compile.zero1(model, optimizers[::-1] if reverse else optimizers, mesh=mesh, **options)
    handles: list[Any] = [optimizer.canzona for optimizer in made]  # type: ignore[attr-defined]
    return [handle.plan().to_json() for handle in handles]


def offline(make: str, **options: Any) -> canzona_compile.OfflinePlan:
    model = Model()
    return canzona_compile.plan(
        model,
        mesh={"dp": 2},
        optimizer=MAKERS[make](model)[0],
        updates="zero1",
        hardware="cpu",
        alternatives=False,
        **options,
    )


@pytest.mark.parametrize(
    ("make", "options"),
    [
        full("muon and adamw", {}),
        full("muon and adamw", {"planner": "alpha", "alpha": 0.5, "bucket_bytes": 1 << 20}),
        full("adamw", {}),
    ],
    ids=str,
)
def test_offline_and_real_plans_are_equal(make: str, options: dict[str, Any]) -> None:
    options = {"bucket_bytes": BUCKETS, **options}
    planned = offline(make, **options)
    for plans in run(2, plan_of_run, make, False, options):
        for text in plans:
            found = json.loads(text)
            assert found["digests"] == dict(planned.file.digests)
            assert found["fingerprint"] == planned.fingerprint
    assert "buckets" in dict(planned.file.digests)


def plan_under_tensor_parallelism(options: dict[str, Any]) -> str:
    """The plan of a run on dp=2, tp=2, whose matrices are DTensors over tp."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = Model()
    for block in model.blocks:
        assert isinstance(block, Block)
        for module, dim in ((block.up, 0), (block.down, 1)):
            module.weight = nn.Parameter(distribute_tensor(module.weight, mesh["tp"], [Shard(dim)]))
    made = canzona_compile.zero1(model, MAKERS["muon and adamw"](model), mesh=mesh["dp"], **options)
    handle: Any = made[0].canzona  # type: ignore[attr-defined]
    return str(handle.plan().fingerprint)


@pytest.mark.full
def test_under_tensor_parallelism() -> None:
    shapes = {
        name: {"shape": list(param.shape), "tp": cut_dim(name), "elementwise": cut_dim(name) is None}
        for name, param in Model().named_parameters()
    }
    planned = canzona_compile.plan(
        shapes,
        mesh={"dp": 2, "tp": 2},
        optimizer=torch.optim.Muon([nn.Parameter(torch.zeros(2, 2))], lr=0.02, weight_decay=0.1),
        updates="zero1",
        hardware="cpu",
        alternatives=False,
        bucket_bytes=BUCKETS,
    )
    assert run(4, plan_under_tensor_parallelism, {"bucket_bytes": BUCKETS}) == [planned.fingerprint] * 4


def cut_dim(name: str) -> int | None:
    """The dim of a matrix that tensor parallelism cuts."""
    return {"up.weight": 0, "down.weight": 1}.get(".".join(name.split(".")[-2:]))


@pytest.mark.full
def test_the_order_of_optimizers_does_not_count() -> None:
    options = {"bucket_bytes": BUCKETS}
    (one, *_), (two, *_) = (run(2, plan_of_run, "muon and adamw", reverse, options) for reverse in (False, True))
    assert json.loads(one[0])["fingerprint"] == json.loads(two[0])["fingerprint"]


FUSED = {"bucket_bytes": BUCKETS // 10}


def plan_of_fused_weights() -> str:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model = FusedModel()
    made: Any = canzona_compile.zero1(model, named("muon", model), mesh=mesh, split=SPLITS["interleaved"], **FUSED)
    return str(made[0].canzona.plan().fingerprint)


@pytest.mark.full
def test_pieces_of_fused_weights_are_matrices_of_the_offline_plan() -> None:
    shapes: dict[str, Any] = {}
    for name, param in FusedModel().named_parameters():
        parts = {"qkv.weight": QKV, "gate_up.weight": GATE_UP}.get(name.split(".", 2)[2], {})
        shapes |= {f"{name}[{part}]": [rows, param.shape[1]] for part, rows in parts.items()}
        if not parts:
            shapes[name] = {"shape": list(param.shape), "elementwise": param.ndim < 2}
    muon = torch.optim.Muon([nn.Parameter(torch.zeros(2, 2))], lr=0.02, weight_decay=0.1)
    options: dict[str, Any] = {"updates": "zero1", "hardware": "cpu", "alternatives": False, **FUSED}
    planned = canzona_compile.plan(shapes, mesh={"dp": 2}, optimizer=muon, **options)
    assert run(2, plan_of_fused_weights) == [planned.fingerprint] * 2


# -- a run that follows a plan -------------------------------------------------------------------


PLANNERS = ("lpt-swap", "alpha")  # the default, and one that deals matrices otherwise


def follow(plan: Any) -> tuple[list[str], dict[str, int], str]:
    """Train by a plan beside DDP; what differs, the rank that updates each matrix, and the fingerprint."""
    found = compare("muon and adamw", 3, ddp=True, bucket_bytes=BUCKETS, plan=plan)
    model = Model()
    handle = zero1(model, MAKERS["muon and adamw"](model), bucket_bytes=BUCKETS, plan=plan)[0].canzona
    owners = {part.name: part.owner for bucket in handle.model_plan.step.buckets for part in bucket.slices}
    return found, {task.name: owners[task.name] for task in handle.model_plan.step.tasks}, handle.plan().fingerprint


def test_a_run_takes_the_owners_of_its_plan(tmp_path: Path) -> None:
    """Not those that it would choose."""
    chosen, planned = (offline("muon and adamw", bucket_bytes=BUCKETS, planner=name).file for name in PLANNERS)
    owners = {task.name: task.replica for task in planned.tasks}
    assert owners != {task.name: task.replica for task in chosen.tasks}
    path = tmp_path / "plan.json"
    path.write_text(planned.to_json())
    after = partial(step_alone, "muon and adamw", torch.float32)
    assert run(2, follow, path, after=after) == [([], owners, planned.fingerprint)] * 2


def refused(plan: Any, api: str) -> str:
    model = Model()
    optimizers = MAKERS["muon and adamw"](model)
    if api == "zero1":
        return attempt(lambda: zero1(model, optimizers, bucket_bytes=BUCKETS, plan=plan)).said
    mesh = mesh_of((2,), ("dp",))
    return attempt(lambda: canzona_compile.wrap(optimizers[0], replicate=mesh, model=model, plan=plan)).said


def test_plans_that_do_not_fit_are_refused_by_all_ranks() -> None:
    made = offline("muon and adamw", bucket_bytes=BUCKETS).file
    other = offline("muon and adamw", bucket_bytes=2 * BUCKETS).file
    model = Model()
    wrap = canzona_compile.plan(
        model, mesh={"dp": 2}, optimizer=MAKERS["muon and adamw"](model)[0], hardware="cpu", alternatives=False
    ).file
    cases: list[tuple[PlanFile, str, str]] = [
        (other, "zero1", "would differ from the plan in its buckets"),
        (replace(made, tasks=made.tasks[1:]), "zero1", "does not have this parameter"),
        (replace(made, replicas=4), "zero1", "is for 4 data-parallel ranks, but the mesh has 2"),
        (wrap, "zero1", "the plan was made for wrap"),
        (made, "wrap", "the plan was made for zero1"),
    ]
    for plan, api, says in cases:
        for said in run(2, refused, plan, api):
            assert says in said, said


def test_a_plan_with_a_rank_that_there_is_not_is_no_plan() -> None:
    made = offline("muon and adamw", bucket_bytes=BUCKETS).file
    entries = made.to_dict()
    entries["tasks"][0]["replica"] = 2
    with pytest.raises(CanzonaError, match="is not a data-parallel rank of the plan"):
        read_plan(entries)


def test_other_buckets_are_another_plan() -> None:
    small, large = (offline("muon and adamw", bucket_bytes=size) for size in (BUCKETS, 2 * BUCKETS))
    different = {name for name, digest in small.file.digests if dict(large.file.digests)[name] != digest}
    assert different == {"buckets"}
    assert small.step.buckets[0].dtype == torch.float32
