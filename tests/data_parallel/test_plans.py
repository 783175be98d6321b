"""The plan of a run under zero1 is the plan that is made offline."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import canzona_compile
from tests.data_parallel.models import MAKERS, Block, Model
from tests.harness.marks import full
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


@pytest.mark.ranks
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
@pytest.mark.ranks
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
@pytest.mark.ranks
def test_the_order_of_optimizers_does_not_count() -> None:
    options = {"bucket_bytes": BUCKETS}
    (one, *_), (two, *_) = (run(2, plan_of_run, "muon and adamw", reverse, options) for reverse in (False, True))
    assert json.loads(one[0])["fingerprint"] == json.loads(two[0])["fingerprint"]


def test_other_buckets_are_another_plan() -> None:
    small, large = (offline("muon and adamw", bucket_bytes=size) for size in (BUCKETS, 2 * BUCKETS))
    different = {name for name, digest in small.file.digests if dict(large.file.digests)[name] != digest}
    assert different == {"buckets"}
    assert small.step.buckets[0].dtype == torch.float32
