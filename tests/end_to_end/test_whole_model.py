"""One line trains every parameter of a model with the bits of the plain chain, in every layout, and resumes."""

from __future__ import annotations

import copy
import math
import pickle
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Muon
from torch.optim import lr_scheduler as schedulers

import canzona_compile
from canzona_compile import CanzonaError, Chain, chain
from canzona_compile.data_parallel.gradient import ReducedGradient
from canzona_compile.optimizers import KLSOAP, SOAP, NorMuon
from canzona_compile.tensors import local_part
from tests.data_parallel.models import Model, different
from tests.harness.layouts import full as whole
from tests.harness.layouts import mesh_of
from tests.harness.marks import first, full
from tests.harness.model_pairs import Given, loss_of
from tests.harness.optimizers import shared_captures
from tests.harness.pairs import params_of
from tests.harness.ranks import do_alone, run

RATE = 1e-2
LINES: dict[str, Any] = {  # the optimizer of matrices
    "muon_adamw": partial(Muon, adjust_lr_fn="match_rms_adamw"),
    "soap_adamw": SOAP,
    "kl_soap_adamw": KLSOAP,
}
HIDDEN = {f"blocks.{i}.{name}.weight" for i in range(2) for name in ("up", "down")}


def sharded(layout: str) -> tuple[nn.Module, dict[str, Any]]:
    """A model in a layout, and the options that `muon_adamw` needs for it."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    model = Model()
    if layout == "alone":
        return model, {}
    if layout == "zero1":
        return model, {"zero1": mesh_of((world,), ("dp",))}
    if layout == "ddp":
        mesh = mesh_of((world,), ("dp",))
        return DistributedDataParallel(model, process_group=mesh.get_group()), {"replicate": mesh}
    if layout in ("tp", "fsdp_tp"):
        mesh = mesh_of((world,), ("tp",)) if layout == "tp" else mesh_of((world // 2, 2), ("dp", "tp"))
        styles = {
            f"blocks.{i}.{n}": s() for i in range(2) for n, s in (("up", ColwiseParallel), ("down", RowwiseParallel))
        }
        parallelize_module(model, mesh["tp"], styles)
    if layout != "tp":
        mesh = {
            "fsdp": lambda: mesh_of((world,), ("dp",)),
            "hsdp": lambda: mesh_of((2, world // 2), ("replicas", "dp")),
            "fsdp_tp": lambda: mesh_of((world // 2, 2), ("dp", "tp"))["dp"],
        }[layout]()
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model, {}


def plain_chain(model: nn.Module, line: str = "muon_adamw", grouped: bool = False) -> Chain:
    """What a line makes, written by hand; with `GROUPS` if it is grouped."""
    named = list(model.named_parameters())
    matrices: list[Any] = [(name, p) for name, p in named if name in HIDDEN]
    rest: list[Any] = [(name, p) for name, p in named if name not in HIDDEN]
    if grouped:
        rates = 3 * RATE, RATE
        of = "blocks.0.", "blocks.1."
        blocks = [[[one for one in own if one[0].startswith(which)] for which in of] for own in (matrices, rest)]
        matrices, inside = ([{"params": p, "lr": r} for p, r in zip(own, rates, strict=True)] for own in blocks)
        head = {"params": [one for one in rest if one[0] == "head.weight"], "weight_decay": 0.0, "betas": (0.8, 0.9)}
        rest = [{"params": [one for one in rest if one[0] == "embed.weight"]}, *inside, head]
    common: dict[str, Any] = {"lr": RATE, "weight_decay": 0.1}
    return chain(LINES[line](matrices, **common), AdamW(rest, **common))


GROUPS: dict[str, dict[str, Any]] = {
    "blocks.*": {"lr": 7.0},
    "blocks.1.*": {"lr": RATE},
    "blocks.0.*": {"lr": 3 * RATE},
    "head.*": {"weight_decay": 0.0, "betas": (0.8, 0.9)},
}


def train(layout: str, steps: int = 4, line: str = "muon_adamw") -> dict[str, Any]:
    """Train beside a plain chain that takes the same gradients; what differs, and what is saved."""
    pair = beside(layout, line)
    (made,) = pair.optimizers
    before = [whole(p).clone() for p in pair.model.parameters()]
    found: list[str] = []
    for step in range(steps):
        pair.train(step)
        found += [f"step {step}: {what}" for what in pair.different()]
    params = zip(pair.plain.named_parameters(), pair.model.parameters(), before, strict=True)
    return {
        "different": found,
        "still": [name for (name, _), p, value in params if torch.equal(value, whole(p))],
        "matrices": set(made.optimizers[0].param_groups[0]["param_names"]),
        "tasks": {task.name for task in made.canzona.report().tasks},
        "local": {task.name for task in made.canzona.report().local},
    }


def beside(layout: str, line: str = "muon_adamw", groups: Any = None, **more: Any) -> Given:
    """A model in a layout, and a plain one, with their chains. On some ranks batches are equal."""
    model, options = sharded(layout)
    with shared_captures():
        made = getattr(canzona_compile, line)(model, lr=RATE, groups=groups, **options, **more)
    plain, all_ranks = Model(), layout in ("ddp", "zero1", "fsdp")
    loss = loss_of if all_ranks else lambda model, step, _: loss_of(model, step, 0)
    return Given(model, [made], plain, [plain_chain(plain, line, groups is not None)], loss)


def alone(line: str = "muon_adamw") -> None:
    """Train in one process, which captures what ranks need."""
    found = train("alone", line=line)
    assert (found["different"], found["still"], found["tasks"]) == ([], [], HIDDEN)


LAYOUTS = [("fsdp", 2), ("zero1", 2), ("ddp", 2), ("fsdp_tp", 4), full("tp", 2), full("hsdp", 4)]


@pytest.mark.parametrize(("layout", "world"), LAYOUTS)
def test_layouts(layout: str, world: int) -> None:
    for found in run(world, train, layout, after=partial(alone)):
        assert found["different"] == []
        assert found["still"] == []
        assert found["matrices"] == HIDDEN
        assert found["tasks"] == HIDDEN
        if layout != "zero1":
            assert len(found["local"]) == len(list(Model().parameters())) - len(HIDDEN)


@pytest.mark.parametrize("line", list(LINES))
def test_one_process(line: str) -> None:
    do_alone(partial(alone, line))


@pytest.mark.parametrize(
    ("line", "layout"), [("soap_adamw", "fsdp"), ("kl_soap_adamw", "zero1"), full("kl_soap_adamw", "fsdp")]
)
def test_other_lines(line: str, layout: str) -> None:
    """The first gradient of a matrix only finds its basis."""
    for found in run(2, train, layout, line=line, after=partial(alone, line)):
        assert (found["different"], found["still"], found["matrices"]) == ([], [], HIDDEN)


# -- parameter groups --------------------------------------------------------------------------------

SCHEDULERS: dict[str, Any] = {
    "warmup": partial(schedulers.LinearLR, start_factor=0.1, total_iters=3),
    "one cycle, one rate for all": partial(schedulers.OneCycleLR, max_lr=RATE, total_steps=8, cycle_momentum=False),
    "plateau": partial(schedulers.ReduceLROnPlateau, patience=0, factor=0.3),
    "cosine": partial(schedulers.CosineAnnealingLR, T_max=5),
    "one cycle": lambda optimizer: schedulers.OneCycleLR(
        optimizer, [group["lr"] for group in optimizer.param_groups], total_steps=8, cycle_momentum=False
    ),
}


def grouped(layout: str, scheduler: str, groups: Any = GROUPS) -> None:
    """Train with rates of their own, beside groups that are written by hand."""
    pair = beside(layout, groups=groups)
    (made,), (expected,) = pair.optimizers, pair.expected
    both = [SCHEDULERS[scheduler](optimizer) for optimizer in (made, expected)]
    found = []
    for step in range(5):
        pair.train(step)
        found += pair.different()
        for own in both:
            own.step(*[1.0] if scheduler == "plateau" else [])
        key = "weight_decay", "lr"
        settings = [{tuple(g[k] for k in key) for g in own.param_groups} for own in (made, expected)]
        assert settings[0] == settings[1], step
    assert found == []


@pytest.mark.parametrize("scheduler", first(SCHEDULERS, 3))
def test_rates_of_their_own(scheduler: str) -> None:
    do_alone(partial(grouped, "alone", scheduler))


@pytest.mark.parametrize(("layout", "world"), [("fsdp", 2), ("zero1", 2), full("fsdp_tp", 4), full("ddp", 2)])
def test_rates_of_their_own_on_ranks(layout: str, world: int) -> None:
    run(world, grouped, layout, "cosine", after=partial(grouped, "alone", "cosine"))


def by_name(name: str, shape: tuple[int, ...]) -> dict[str, Any] | None:
    """What `GROUPS` says."""
    if name.startswith("head."):
        assert len(shape) == 2
        return GROUPS["head.*"]
    return GROUPS[f"{name[:8]}.*"] if name.startswith("blocks.") else None


def test_rates_by_a_function() -> None:
    do_alone(partial(grouped, "alone", "cosine", by_name))


def test_wrong_groups() -> None:
    for groups, at in {
        "rate": "hidden_matrices(model, groups=)",
        ("bloks.*", "lr"): "hidden_matrices(model, groups=)",
        ("blocks.*", "momentum"): "muon_adamw: blocks.0",
        ("blocks.*", "lrr"): "muon_adamw: blocks.0",
        ("blocks.*", "params"): "hidden_matrices(model, groups=)",
    }.items():
        given: Any = groups if isinstance(groups, str) else {groups[0]: {groups[1]: 0.5}}
        with pytest.raises(CanzonaError) as caught:
            canzona_compile.muon_adamw(Model(), groups=given)
        assert caught.value.at.startswith(at), groups
    choice = canzona_compile.hidden_matrices(Model(), groups=GROUPS)
    assert "weight_decay=0.0" in str(choice)
    assert {row.name: row.group for row in choice.rows}["head.weight"] == GROUPS["head.*"]


# -- steps that are skipped --------------------------------------------------------------------------

SKIPPED = {1: ("blocks.1.up.weight", math.inf), 3: ("head.weight", math.nan)}  # by step, whose gradient is spoilt


def spoil(model: nn.Module, step: int) -> None:
    """Put a number that is not finite into a gradient of the last rank, or of the owner under ZeRO-1."""
    if step not in SKIPPED:
        return
    name, value = SKIPPED[step]
    (grad,) = (p.grad for own, p in model.named_parameters() if own.removeprefix("module.") == name)
    last = not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1
    parts = grad.parts if isinstance(grad, ReducedGradient) else [local_part(grad)] if last and grad is not None else []
    for part in parts:
        part.view(-1)[:1].fill_(value)


def skipping(layout: str) -> None:
    """Train beside a plain chain that leaves out the steps of which a rank has a gradient that is not finite."""
    pair = beside(layout, skip_nonfinite=True)
    (made,), (expected,) = pair.optimizers, pair.expected
    for step in range(5):
        pair.both_backward(step)
        spoil(pair.model, step)
        made.step()
        made.zero_grad()
        if step not in SKIPPED:
            expected.step()
        expected.zero_grad()
        assert pair.different() == [], step
    assert [own.param_groups[0]["skipped_steps"] for own in made.optimizers] == [2, 2]
    assert [group["skipped_steps"] for group in made.state_dict()["param_groups"]] == [2, 2]
    assert made.canzona.report().skipped_steps == 2


def test_steps_are_skipped_in_one_process() -> None:
    do_alone(partial(skipping, "alone"))


@pytest.mark.parametrize(("layout", "world"), [("fsdp", 2), ("zero1", 2), full("ddp", 2), full("fsdp_tp", 4)])
def test_steps_are_skipped_on_all_ranks(layout: str, world: int) -> None:
    run(world, skipping, layout, after=partial(skipping, "alone"))


def test_copies_and_checkpoints_without_a_count_go_on() -> None:
    made = canzona_compile.muon_adamw(Model(), skip_nonfinite=True)
    for optimizer in (made, copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        state = optimizer.state_dict()
        for group in state["param_groups"]:
            group.pop("skipped_steps", None)
        optimizer.load_state_dict(state)
        for param in params_of(optimizer):
            param.grad = torch.full_like(param, math.nan)
        optimizer.step()
        assert optimizer.param_groups[0]["skipped_steps"] == 1
    assert "skipped_steps" not in canzona_compile.unwrap(made).param_groups[0]


def one_expert(spoilt: bool) -> None:
    """Each of four ranks has an expert, and a share of the dense matrix. One expert's gradient has a NaN."""
    mesh = mesh_of((4,), ("line",))
    params = [nn.Parameter(distribute_tensor(torch.ones(4, 8, 8), mesh, [Shard(0)])) for _ in range(2)]
    dense = nn.Parameter(distribute_tensor(torch.ones(8, 8), mesh, [Shard(0)]))
    optimizer = canzona_compile.wrap(canzona_compile.optimizers.Muon([*params, dense], lr=0.1), skip_nonfinite=True)
    for step in range(3):
        for param in (*params, dense):
            param.grad = torch.ones_like(param)
        if step == 1 and spoilt and dist.get_rank() == 2:
            local_part(params[1].grad).fill_(math.nan)  # type: ignore[arg-type]
        before = [whole(param).clone() for param in (*params, dense)]
        optimizer.step()
        same = [torch.equal(one, whole(param)) for one, param in zip(before, (*params, dense), strict=True)]
        assert same == [step == 1 and spoilt] * 3
    assert optimizer.param_groups[0]["skipped_steps"] == int(spoilt)


def test_a_nan_in_one_expert_of_four_ranks() -> None:
    run(4, one_expert, spoilt=True)


def unheard() -> None:
    """Ranks that share no matrix cannot tell each other."""
    param = nn.Parameter(torch.ones(4, 4))
    for optimizer in (AdamW([param]), Muon([param])):
        wrapped = canzona_compile.wrap(optimizer, skip_nonfinite=True)
        for _ in range(2):
            param.grad = torch.ones_like(param)
            with pytest.raises(CanzonaError, match="could not tell the others"):
                wrapped.step()
        assert torch.equal(param.detach(), torch.ones(4, 4))


def test_ranks_that_share_nothing_are_refused() -> None:
    run(2, unheard)


WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def saved_after(path: str, begin: int, steps: int) -> list[str]:
    """Train under FSDP2 from a checkpoint of another number of ranks, if there is one, and save; what differs.

    The gradients do not depend on the number of ranks, so a plain chain in the same process is the oracle.
    """
    pair = beside("fsdp")
    model, plain, (made,), (expected,) = pair.model, pair.plain, pair.optimizers, pair.expected
    pair.loss = lambda model, step, _: loss_of(model, step, 0)
    if begin:
        loaded = torch.load(path, weights_only=False)
        with torch.no_grad():
            for param, value in zip(plain.parameters(), loaded["model"], strict=True):
                param.copy_(value)
            for param, value in zip(model.parameters(), loaded["model"], strict=True):
                param.copy_(torch.distributed.tensor.distribute_tensor(value, param.device_mesh, param.placements))
        expected.load_state_dict(loaded["plain"])
        set_optimizer_state_dict(model, made, loaded["optimizer"], options=WHOLE)
    pair.train(*range(begin, begin + steps))
    saved = get_optimizer_state_dict(model, made, options=WHOLE)
    values = [whole(p).detach().clone() for p in model.parameters()]
    if dist.get_rank() == 0:
        torch.save({"optimizer": saved, "model": values, "plain": expected.state_dict()}, path)
    dist.barrier()
    return different(model, plain)


def test_checkpoints_go_from_two_ranks_to_three_to_one(tmp_path: Any) -> None:
    path, begin = str(tmp_path / "saved"), 0
    for world in (2, 3, 1):
        assert run(world, saved_after, path, begin, 2, after=partial(alone)) == [[]] * world
        begin += 2


# -- arguments ---------------------------------------------------------------------------------------


def test_arguments_reach_their_optimizers() -> None:
    made: Any = canzona_compile.muon_adamw(
        Model(),
        lr=1e-3,
        others="blocks.0.*",
        muon={"momentum": 0.9, "lr": 2e-3},
        adamw={"betas": (0.9, 0.95), "weight_decay": 0.0},
        depth=1,
    )
    muon, adamw = made.optimizers
    assert [muon.defaults[k] for k in ("lr", "momentum", "adjust_lr_fn")] == [2e-3, 0.9, "match_rms_adamw"]
    assert [adamw.defaults[k] for k in ("lr", "betas", "weight_decay")] == [1e-3, (0.9, 0.95), 0.0]
    assert set(muon.param_groups[0]["param_names"]) == {name for name in HIDDEN if name.startswith("blocks.1.")}
    assert [session.options.depth for session in made.canzona.sessions] == [1, 1]


def test_any_two_optimizers() -> None:
    pattern = "blocks.0.*"
    made: Any = canzona_compile.optimizer_for(
        Model(), partial(NorMuon, lr=2e-3), partial(AdamW, lr=1e-3), others=pattern, depth=1
    )
    matrix, other = made.optimizers
    assert [type(own).__name__ for own in made.optimizers] == ["CanzonaNorMuon", "CanzonaAdamW"]
    assert [own.defaults["lr"] for own in made.optimizers] == [2e-3, 1e-3]
    assert set(matrix.param_groups[0]["param_names"]) == {name for name in HIDDEN if name.startswith("blocks.1.")}
    assert HIDDEN - {*matrix.param_groups[0]["param_names"]} <= {*other.param_groups[0]["param_names"]}
    with pytest.raises(TypeError, match=r"(?s)optimizer_for\(\).*'lr'.*functools.partial"):
        canzona_compile.optimizer_for(Model(), NorMuon, lr=2e-3)
    with pytest.raises(TypeError, match=r"takes what makes an optimizer, not NorMuon.*functools.partial"):
        canzona_compile.optimizer_for(Model(), NorMuon(nn.Linear(4, 4, bias=False).parameters()))  # type: ignore[arg-type]
    with pytest.raises(CanzonaError, match="no hidden matrix for SOAP"):
        canzona_compile.soap_adamw(nn.Sequential(nn.Embedding(8, 4), nn.LayerNorm(4)))
    soap: Any = canzona_compile.soap_adamw(Model(), soap={"every": 1, "lr": 1e-3})
    assert [soap.optimizers[0].defaults[k] for k in ("every", "lr")] == [1, 1e-3]


def test_matrices_alone_and_none_at_all() -> None:
    only: Any = canzona_compile.muon_adamw(nn.Sequential(nn.Linear(4, 6, bias=False), nn.Linear(6, 4, bias=False)))
    assert [type(own).__name__ for own in only.optimizers] == ["CanzonaMuon"]
    with pytest.raises(CanzonaError, match="no hidden matrix"):
        canzona_compile.muon_adamw(nn.Sequential(nn.Embedding(8, 4), nn.LayerNorm(4)))
    with pytest.raises(CanzonaError, match="matches no parameter"):
        canzona_compile.muon_adamw(Model(), others="layers.*")
    with pytest.raises(TypeError, match="speed"):
        canzona_compile.muon_adamw(Model(), speed=1)
    model = Model()
    with pytest.raises(CanzonaError, match="depth"):
        canzona_compile.muon_adamw(model, depth=0)
    assert params_of(plain_chain(model))
