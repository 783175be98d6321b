"""Chains on ranks: the bits of optimizers stepped by hand on one device, one plan, and no half of a refused step."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard
from torch.optim import AdamW, Muon
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.optimizer import register_optimizer_step_pre_hook

import canzona_compile
from canzona_compile import CanzonaError, Chain, chain
from examples.optimizers.soap import SOAP
from tests.data_parallel.models import Model, hidden, others
from tests.harness import model_pairs
from tests.harness.checkpointing import EVERY
from tests.harness.layouts import ALONE, Case, local, mesh_of
from tests.harness.marks import first
from tests.harness.mistakes import attempt
from tests.harness.pairs import Pair, parameters, params_of, unlike
from tests.harness.ranks import run
from tests.harness.training import Training, check, falling, on_ranks, ready

HIDDEN = ((12, 8), (8, 12), (9, 7), (7, 9), (12, 8))
SOAPED = ((7, 4), (5, 5))  # with the period, as in tests/harness/checkpointing.py: it is captured once for all
REST = ((20, 8), (5, 3))


def two(params: list[Any]) -> Chain:
    return chain(Muon(params[:5], lr=0.1), AdamW(params[5:], lr=0.01))


def three(params: list[Any]) -> Chain:
    return chain(Muon(params[:5], lr=0.1), SOAP(params[5:7], lr=0.1, every=EVERY), AdamW(params[7:], lr=0.01))


TRAININGS = {
    make.__name__: Training(make, (*HIDDEN, *SOAPED, *REST), steps=5, schedule=falling(0.1), sizes=(0.1, 1e-2))
    for make in (two, three)
}


CASES = [Case("fsdp", (3,)), Case("hsdp", (2, 2)), Case("ddp", (2,)), Case("tp_rows", (2,)), Case("fsdp_tp", (2, 2))]


@pytest.mark.parametrize("case", first(CASES), ids=str)
@pytest.mark.parametrize("recipe", ["three", *first(["two"], 0)])
def test_layouts(recipe: str, case: Case) -> None:
    outcomes = on_ranks(__name__, recipe, [case], strategy="owner", restored=case.layout == "fsdp")
    report = check(outcomes)
    matrices = {"two": 5, "three": 7}[recipe]
    assert len(report["tasks"]) == matrices
    assert len(report["local"]) == 9 - matrices
    assert report["optimizer"] == {"two": "Muon+AdamW", "three": "Muon+SOAP+AdamW"}[recipe]


def unequal(params: list[Any]) -> Chain:
    """Each optimizer has one matrix that outweighs the others, so that apart both would go to the same rank."""
    return chain(Muon(params[:3], lr=0.1), Muon(params[3:], lr=0.1))


TRAININGS["unequal"] = Training(
    unequal, ((64, 64), (8, 8), (8, 8), (64, 64), (8, 8), (8, 8)), steps=2, schedule=falling(0.1), sizes=(0.1, 1e-2)
)


def test_owners_are_balanced_over_all_optimizers() -> None:
    outcomes = on_ranks(__name__, "unequal", [Case("fsdp", (2,))], strategy="owner")
    tasks = check(outcomes)["tasks"]
    heavy = [task["owner"] for task in tasks if task["shape"] == [64, 64]]
    assert len(heavy) == 2
    assert heavy[0] != heavy[1]


def measured() -> dict[int, Any]:
    """Seconds of each act of the second optimizer, by rank and step."""
    pair = beside(two, Case("fsdp", (2,)))
    pair.steps(2)
    pair.wrapped.canzona.measure(2)
    pair.steps(2)
    return {rank: times.acts for rank, times in pair.wrapped.canzona.sessions[1].measuring.found.ranks.items()}


def test_all_ranks_measure_all_optimizers() -> None:
    """The elementwise one shares no task with another rank, and its figures come from all of them all the same."""
    for found in run(2, measured, after=ready(__name__, "two")):
        assert sorted(found) == [0, 1]
        assert all(acts["local"] > 0 for steps in found.values() for acts in steps)


# -- a step that one of them refuses ---------------------------------------------------------------


def beside(make: Callable[[list[Any]], Chain], case: Case) -> Pair:
    """A wrapped chain of fragments, and the same one by hand of whole tensors."""
    return Pair(make, (*HIDDEN, *SOAPED, *REST), case=case)


def refused_on_one_rank(missing: bool) -> str:
    """The second optimizer lacks a gradient on one rank, or has another rate there; then all goes on."""
    pair = beside(three, Case("fsdp", (2,)))
    pair.steps(2)
    pair.feed()
    soap = pair.wrapped.optimizers[1].param_groups[0]
    if dist.get_rank() == 1:
        if missing:
            soap["params"][0].grad = None
        else:
            soap["lr"] = 7.0
    before = [local(p).clone() for p in params_of(pair.wrapped)]
    with pytest.raises(CanzonaError) as error:
        pair.wrapped.step()
    assert all(torch.equal(a, local(b)) for a, b in zip(before, params_of(pair.wrapped), strict=True))
    soap["lr"] = 0.1
    pair.steps(1)
    return type(error.value).__name__


@pytest.mark.parametrize("missing", [True, False], ids=["gradient", "rate"])
def test_what_one_optimizer_refuses_none_has_begun(missing: bool) -> None:
    found = run(2, refused_on_one_rank, missing, after=ready(__name__, "three"))
    assert found == ["InvalidGradient" if missing else "RankMismatch"] * 2


def hooked_on_one_rank(everywhere: bool) -> bool:
    """Hooks that only note something run on rank 0, before the first plan and before another one: were they called?"""
    pair = beside(three, Case("fsdp", (2,)))
    noted: list[Any] = []
    with contextlib.ExitStack() as stack:
        if dist.get_rank() == 0:
            member = pair.wrapped.optimizers[1].register_step_pre_hook
            register = register_optimizer_step_pre_hook if everywhere else member
            stack.callback(register(lambda *_: noted.append(1)).remove)
        pair.steps(2)
        pair.set("nesterov", False)
        pair.steps(2)
    return bool(noted)


def hooked_alone() -> None:
    """Capture in one process what ranks need."""
    pair = beside(three, ALONE)
    pair.steps(2)
    pair.set("nesterov", False)
    pair.steps(1)


@pytest.mark.parametrize("everywhere", [False, True], ids=["member", "global"])
def test_hooks_of_one_rank_alone(everywhere: bool) -> None:
    found = run(2, hooked_on_one_rank, everywhere, after=partial(hooked_alone))
    assert found == [True, False]


def hooks_that_change(case: Case) -> None:
    """Hooks of one optimizer set its rate, and drop a gradient once."""
    pair = beside(three, case)
    steps: dict[int, int] = {}

    def change(optimizer: Any, *_: Any) -> None:
        steps[id(optimizer)] = step = steps.get(id(optimizer), -1) + 1
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
        if step == 2:
            optimizer.param_groups[0]["params"][0].grad = None

    for own in pair.both:
        own.optimizers[1].register_step_pre_hook(change)  # type: ignore[union-attr]
    pair.steps(4)


@pytest.mark.parametrize("case", first([Case("fsdp", (2,)), Case("ddp", (2,))]), ids=str)
def test_hooks_of_one_optimizer_may_change_its_step(case: Case) -> None:
    run(2, hooks_that_change, case, after=ready(__name__, "three"))


def other_members() -> str:
    params = [nn.Parameter(torch.ones(shape)) for shape in ((6, 4), (5,), (3,))]
    rank = dist.get_rank()
    rest = [AdamW(params[1:], lr=0.1)] if rank == 0 else [AdamW(params[1:2], lr=0.1), AdamW(params[2:], lr=0.1)]
    made: Any = canzona_compile.wrap(chain(Muon(params[:1], lr=0.1), *rest), replicate=dist.group.WORLD)
    for param in params:
        param.grad = torch.ones_like(param)
    found = attempt(made.step)
    return f"{found.error}: {found.said}"


def test_chains_of_other_lengths_are_refused_on_all_ranks() -> None:
    said = run(2, other_members)
    assert all(text.startswith("RankMismatch") for text in said), said
    assert any("Muon and AdamW and AdamW" in text for text in said), said


# -- another plan in mid-run, and an error before the first one --------------------------------------


def grown(first: int) -> int:
    """Add a group to one optimizer of two after two steps, where owners hold state of both: the number of tasks."""
    pair = Pair(lambda p: chain(Muon(p[:2], lr=0.1), Muon(p[2:4], lr=0.1)), HIDDEN, case=Case("ddp", (2,)))
    pair.steps(2)
    for own, added in zip(pair.both, (parameters(HIDDEN)[4], pair.laid.params[4]), strict=True):
        own.add_param_group({"params": [added]}, to=first)  # type: ignore[call-arg]
    pair.steps(2)
    return len(pair.wrapped.canzona.plan().tasks)


@pytest.mark.parametrize("first", [0, 1])
def test_one_of_them_plans_anew(first: int) -> None:
    assert run(2, grown, first, after=ready(__name__, "two")) == [5, 5]


def wrong_before_the_first_step() -> str:
    """The first optimizer has a sparse gradient on one rank; the second one's fragments need an exchange."""
    mesh = mesh_of((2,), ("tp",))
    names = [("a.weight", nn.Parameter(torch.ones(4, 6))), ("b.weight", nn.Parameter(torch.ones(4, 6)))]
    made: Any = chain(Muon(names[:1], lr=0.1), Muon(names[1:], lr=0.1))
    canzona_compile.wrap(made, layout={"*": (mesh, [Shard(0)])})
    for _, param in names:
        param.grad = torch.ones_like(param)
    if dist.get_rank() == 1:
        names[0][1].grad = torch.ones(4, 6).to_sparse()
    return attempt(made.step).said


def test_an_error_of_one_optimizer_reaches_all_ranks_at_once() -> None:
    said = run(2, wrong_before_the_first_step)
    assert all("a.weight" in text or "rank 1" in text for text in said), said


# -- ZeRO-1 ----------------------------------------------------------------------------------------


def whole(model: nn.Module) -> Chain:
    return chain(Muon(hidden(model), lr=0.02), AdamW(others(model), lr=1e-3))


def under_zero1(gather: str) -> list[str]:
    """Train a chain under zero1 beside a plain one that takes the mean of the gradients of all ranks; what differs."""
    pair = model_pairs.under_zero1(Model(), whole, gather=gather)
    plain, (expected,), (made,) = pair.plain, pair.expected, pair.optimizers
    schedules = [LambdaLR(own, lambda k: 1.0 / (1 + k)) for own in (made, expected)]
    found: list[str] = []
    for step in range(3):
        pair.both_backward(step)
        of, clipped = [(None, list(plain.parameters())), (made.optimizers[1], others(plain))][step % 2]
        norm = made.canzona.clip_grad_norm_(0.5, of=of)
        if not torch.allclose(norm, nn.utils.get_total_norm([p.grad for p in clipped if p.grad is not None])):
            found.append(f"step {step}: the norm")
        nn.utils.clip_grads_with_norm_(clipped, 0.5, norm)
        with pytest.raises(CanzonaError, match="was not passed to zero1"):
            made.canzona.clip_grad_norm_(0.5, of=expected.optimizers[1])
        pair.update()
        for schedule in schedules:
            schedule.step()
        found += [f"step {step}: {name}" for name in pair.different()]
    report = made.canzona.report()
    if len(report.tasks) != len(hidden(pair.model)):
        found.append(f"{len(report.tasks)} tasks")
    saved = copy.deepcopy(made.state_dict())
    canzona_compile.unwrap(made)
    if type(made) is not Chain or unlike("state", saved["state"], made.state_dict()["state"]):
        found.append("unwrap")
    return found


def alone() -> None:
    """Capture in one process what ranks need."""
    model = Model()
    model_pairs.train_alone(model, [whole(model)])


@pytest.mark.parametrize("gather", first(["forward", "step"]))
def test_zero1(gather: str) -> None:
    assert run(2, under_zero1, gather, after=partial(alone)) == [[]] * 2
