"""A plan made offline is the plan of the run, and a run follows a plan that it is given."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_module, distribute_tensor

import canzona_compile
from canzona_compile.ir import pipeline
from canzona_compile.ir.options import Options
from canzona_compile.ir.plan_file import PlanFile
from canzona_compile.ir.step import Form
from canzona_compile.machine.hardware import named_hardware
from canzona_compile.passes import FollowOwners, lowering_passes
from examples.optimizers.soap import SOAP
from tests.harness.layouts import mesh_of
from tests.harness.marks import also, crossed, full
from tests.harness.mistakes import attempt
from tests.harness.optimizers import share_captures
from tests.harness.ranks import run

LAYERS, HIDDEN, WIDE = 2, 48, 80


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.o = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(2))
        self.up, self.down = nn.Linear(HIDDEN, WIDE, bias=False), nn.Linear(WIDE, HIDDEN, bias=False)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))


SHAPES = {
    f"layers.{i}.{name}.weight": {"shape": shape, "tp": tp}
    for i in range(LAYERS)
    for name, shape, tp in (
        ("q", [HIDDEN, HIDDEN], 0),
        ("o", [HIDDEN, HIDDEN], 1),
        ("up", [WIDE, HIDDEN], 0),
        ("down", [HIDDEN, WIDE], 1),
    )
}
OURS: dict[Any, Any] = {}  # captures of this file, whose names are in its plans
MESHES = ("fsdp=4", "hsdp=2,fsdp=2", "dp=4", "tp=4", "fsdp=2,tp=2", "dp=2,tp=2")


def build(mesh: str) -> tuple[Model, Any]:
    """The model on four ranks, and what `replicate=` has to be."""
    torch.manual_seed(0)
    model = Model()
    sizes = {name: int(size) for name, _, size in (part.partition("=") for part in mesh.split(","))}
    whole = mesh_of(tuple(sizes.values()), tuple(sizes))
    if "tp" in sizes:
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear):
                cut = SHAPES[f"{name}.weight"]["tp"]
                assert isinstance(cut, int)

                def place(_: str, own: nn.Module, on: Any, cut: int = cut) -> None:
                    own.weight = nn.Parameter(distribute_tensor(own.weight, on, [Shard(cut)]))  # type: ignore[arg-type]

                distribute_module(module, whole["tp"], place)
    shards = tuple(name for name in sizes if name in ("hsdp", "fsdp"))
    if shards:
        fully_shard(model, mesh=whole[shards])
    return model, whole["dp"] if "dp" in sizes else None


def give_gradients(params: list[Tensor]) -> None:
    random = torch.Generator().manual_seed(7)
    for param in params:
        full = torch.randn(param.shape, generator=random)
        mesh = getattr(param, "device_mesh", None)
        param.grad = full if mesh is None else distribute_tensor(full, mesh, param.placements)  # type: ignore[attr-defined]


def train(mesh: str, kind: Any, options: dict[str, Any]) -> tuple[str, list[Tensor]]:
    """Two steps; the plan and the weights afterwards."""
    model, replicate = build(mesh)
    params = [p for _, p in model.named_parameters()]
    optimizer = canzona_compile.wrap(kind(params), replicate=replicate, model=model, **options)
    share_captures(optimizer, OURS)
    for _ in range(2):
        give_gradients(params)
        optimizer.step()
    weights = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in params]
    return optimizer.canzona.plan().to_json(), [w.detach().clone() for w in weights]


def on_ranks(mesh: str, kind: Any, options: dict[str, Any]) -> list[tuple[str, list[Tensor]]]:
    """`train` on four ranks; what they share is captured once, before."""
    return run(4, train, mesh, kind, options, after=partial(train_alone, kind, True))


def offline(mesh: str, kind: Any = torch.optim.Muon, **options: Any) -> canzona_compile.OfflinePlan:
    return canzona_compile.plan(SHAPES, mesh=mesh, optimizer=kind, hardware="cpu", alternatives=False, **options)


@pytest.mark.parametrize("mesh", [m if m in ("fsdp=4", "dp=2,tp=2") else full(m) for m in MESHES])
def test_offline_and_real_plans_are_equal(mesh: str) -> None:
    real = [json.loads(text) for text, _ in on_ranks(mesh, torch.optim.Muon, {})]
    planned = offline(mesh)
    assert [plan["digests"] for plan in real] == [dict(planned.file.digests)] * 4
    assert {plan["fingerprint"] for plan in real} == {planned.fingerprint}


@pytest.mark.full
def test_of_an_optimizer_with_variants_too() -> None:
    (text, _), *_ = on_ranks("fsdp=4", SOAP, {"strategy": "owner"})
    assert json.loads(text)["fingerprint"] == offline("fsdp=4", SOAP, strategy="owner").fingerprint


@pytest.mark.parametrize("kind", [torch.optim.Muon, SOAP])
def test_plans_do_not_depend_on_the_order_of_a_group_s_keys(kind: Any) -> None:
    def plan_of(**given: float) -> str:
        weight = nn.Parameter(torch.ones(6, 4))
        optimizer: Any = canzona_compile.wrap(kind([{"params": [weight], **given}], lr=0.1))
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        return str(optimizer.canzona.plan().fingerprint)

    assert plan_of() == plan_of(weight_decay=0.3, lr=0.1)


@pytest.mark.parametrize("planner", ["alpha", *also(["lpt"])])
def test_a_run_follows_the_plan_of_any_planner(planner: str, tmp_path: Path) -> None:
    made = offline("hsdp=2,fsdp=2", planner=planner, strategy="owner", micro_groups=2)
    path = tmp_path / "plan.json"
    path.write_text(made.to_json())
    plain = train_alone(torch.optim.Muon)
    for text, weights in run(4, train, "hsdp=2,fsdp=2", torch.optim.Muon, {"plan": str(path)}):
        followed = json.loads(text)
        assert followed["fingerprint"] == made.fingerprint
        assert [t["owner"] for t in followed["tasks"]] == [list(t.owner or ()) for t in made.file.tasks]
        assert all(torch.equal(a, b) for a, b in zip(weights, plain, strict=True))


def train_alone(kind: Any, wrapped: bool = False) -> list[Tensor]:
    torch.manual_seed(0)
    model = Model()
    params = list(model.parameters())
    optimizer = kind(params)
    if wrapped:
        share_captures(canzona_compile.wrap(optimizer, model=model), OURS)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for _ in range(2):
        give_gradients(list(params))
        optimizer.step()
    torch.set_num_threads(threads)
    return [p.detach() for p in params]


@pytest.mark.full
def test_a_run_s_own_plan_can_be_followed(tmp_path: Path) -> None:
    text = on_ranks("fsdp=4", torch.optim.Muon, {"strategy": "owner"})[0][0]
    path = tmp_path / "plan.json"
    path.write_text(text)
    assert json.loads(on_ranks("fsdp=4", torch.optim.Muon, {"plan": path})[0][0])["fingerprint"] in text


def refused(mesh: str, options: dict[str, Any]) -> str:
    return attempt(lambda: train(mesh, torch.optim.Muon, options)).said


def test_plans_that_do_not_fit_are_refused_by_all_ranks(tmp_path: Path) -> None:
    made = json.loads(offline("fsdp=4", strategy="owner").to_json())
    cases = {
        "another mesh": (json.loads(offline("hsdp=2,fsdp=2", strategy="owner").to_json()), "layers.0.q.weight"),
        "a parameter too few": ({**made, "tasks": made["tasks"][1:]}, "layers.0.q.weight"),
        "a parameter too many": (
            {**made, "tasks": [*made["tasks"], {**made["tasks"][0], "name": "another"}]},
            "another",
        ),
        "a strategy of an earlier release": (
            {**made, "tasks": [{**t, "strategy": "gram"} for t in made["tasks"]]},
            "a run cannot execute the strategy 'gram' of this plan",
        ),
        "other groups": ({**made, "groups": [[n] for n in made["groups"][0]]}, "in its groups and schedule"),
    }
    for name, (plan, words) in cases.items():
        path = tmp_path / "plan.json"
        path.write_text(json.dumps(plan))
        found = run(4, refused, "fsdp=4", {"plan": str(path)}, after=partial(train_alone, torch.optim.Muon, True))
        assert all(words in text for text in found), (name, found)
        assert dist.is_available()


def test_some_matrices_everywhere_others_on_owners(tmp_path: Path) -> None:
    """Over this link it pays to compute two shapes everywhere and not the third, which is more work for its bytes."""
    link = {"bandwidth": 1e8, "latency": 1e-6}
    path = tmp_path / "slow.json"
    calls = {"launch": 1e-9, "product_calls": {"bfloat16": 1e-9, "float32": 1e-9}}  # arithmetic and bytes decide
    slow = {**named_hardware("cpu").to_dict(), **calls, "node": link, "network": link, "name": "slow"}
    path.write_text(json.dumps(slow))
    made = canzona_compile.plan(SHAPES, mesh="dp=4", optimizer=torch.optim.Muon, hardware=path, alternatives=False)
    assert {(t.strategy, t.shape[0] == t.shape[1]) for t in made.file.tasks} == {("owner", True), ("replicated", False)}
    plain = train_alone(torch.optim.Muon)
    for text, weights in on_ranks("dp=4", torch.optim.Muon, {"hardware": str(path)}):
        assert json.loads(text)["fingerprint"] == made.fingerprint
        assert all(torch.equal(a, b) for a, b in zip(weights, plain, strict=True))


@pytest.mark.parametrize(("mesh", "groups"), crossed(["hsdp=2,fsdp=2", "fsdp=4", "dp=2,tp=2"], [1, 3], most=1))
def test_both_in_one_micro_group(mesh: str, groups: int, tmp_path: Path) -> None:
    made = offline(mesh, strategy="owner", micro_groups=groups)
    mixed = replace(
        made.file,
        tasks=tuple(
            replace(t, strategy="replicated", owner=None) if t.shape[0] != t.shape[1] else t for t in made.file.tasks
        ),
    )
    follow = Options(plan=mixed)
    path = tmp_path / "plan.json"
    placed = replace(made.step, form=Form.PLACED, micro_groups=(), schedule=(), buffers=())
    step, _ = pipeline.run(placed, [FollowOwners(mixed), *lowering_passes(follow)])
    path.write_text(PlanFile.of(step).to_json())
    assert groups > 1 or len({step.task(n).strategy for n in step.micro_groups[0].tasks}) == 2
    plain = train_alone(torch.optim.Muon)
    for text, weights in on_ranks(mesh, torch.optim.Muon, {"plan": str(path)}):
        assert {t["strategy"] for t in json.loads(text)["tasks"]} == {"owner", "replicated"}
        assert all(torch.equal(a, b) for a, b in zip(weights, plain, strict=True))
