"""What one rank does wrong, every rank hears of: an error that says what, and nothing half updated."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from canzona_compile.errors import CanzonaError, RankMismatch
from canzona_compile.ir.pipeline import PassRecord
from canzona_compile.replica.raised import failed_on
from canzona_compile.runtime import channel
from tests.harness.layouts import Case, local
from tests.harness.marks import crossed, full, only
from tests.harness.pairs import params_of
from tests.harness.ranks import Died, run
from tests.harness.trainer import NAMES, Outcome, Trainer, check, ready

# -- a rank dies -----------------------------------------------------------------------------------


def step_with_a_victim(case: Case, victim: int, call: int) -> Outcome:
    """In the third step rank `victim` ends at its all-to-all number `call`."""
    trainer = Trainer(case, strategy="owner")
    trainer.go(2)
    groups = len(trainer.optimizer.canzona.report().to_dict()["micro_groups"])
    assert groups == 1, "with several groups the first ones may be updated"
    trainer.feed()
    if dist.get_rank() == victim:
        original, calls = dist.all_to_all_single, 0

        def deadly(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            if calls == call:
                os._exit(7)
            calls += 1
            return original(*args, **kwargs)

        dist.all_to_all_single = deadly
    outcome = trainer.last_step()
    if not outcome.error:  # this rank shares no collective after that with the victim, until now
        outcome = trainer.last_step()
    return outcome


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("case", "victim", "call"),
    [
        pytest.param(Case("fsdp", (3,)), 1, 0, id="before the gather"),
        pytest.param(Case("fsdp", (3,)), 0, 1, id="before the scatter", marks=pytest.mark.full),
        pytest.param(Case("hsdp", (2, 2)), 2, 2, id="before the exchange"),
        pytest.param(Case("ddp", (3,)), 2, 0, id="replicas", marks=pytest.mark.full),
        pytest.param(Case("fsdp", (8,)), 3, 0, id="of 8, before the gather", marks=pytest.mark.full),
        pytest.param(Case("fsdp", (8,)), 0, 1, id="of 8, before the scatter", marks=pytest.mark.full),
        pytest.param(Case("hsdp", (2, 4)), 6, 2, id="of 8, before the exchange", marks=pytest.mark.full),
        pytest.param(Case("ddp", (8,)), 7, 0, id="of 8, replicas", marks=pytest.mark.full),
    ],
)
def test_a_rank_dies_in_mid_step(case: Case, victim: int, call: int) -> None:
    found = run(case.world, step_with_a_victim, case, victim, call, dying=[victim], after=ready())
    assert found.pop(victim) == Died(7)
    for outcome in found:
        assert outcome.ours, f"{outcome.error}: {outcome.said}"
        assert f"no answer from rank {victim}" in outcome.said
    if case.layout != "hsdp":
        assert [outcome.changed for outcome in found] == [[]] * (case.world - 1)


def step_with_a_failing_observer(case: Case, strategy: str, victim: int) -> Outcome:
    """On rank `victim` an observer raises when the program of the first step was emitted, before ranks connect."""
    trainer = Trainer(case, strategy=strategy)
    trainer.feed()

    def fail(record: PassRecord) -> None:
        if record.name == "emit":
            raise ValueError("the disk is full")

    if dist.get_rank() == victim:
        trainer.optimizer.canzona.session.observers.append(fail)
    return trainer.last_step()


@pytest.mark.ranks
@pytest.mark.parametrize("strategy", ["owner", "replicated"])
def test_a_rank_fails_while_it_makes_the_program(strategy: str) -> None:
    found = run(2, step_with_a_failing_observer, Case("fsdp", (2,)), strategy, 1, after=ready())
    assert [outcome.error for outcome in found] == ["RankMismatch", "ValueError"]
    assert "failed on rank 1: ValueError: the disk is full" in found[0].said


def step_without(absent: int) -> Outcome | None:
    """In the third step rank `absent` does something else until the others have raised."""
    trainer = Trainer(Case("fsdp", (dist.get_world_size(),)))
    trainer.go(2)
    trainer.feed()
    dist.barrier()
    store = dist.distributed_c10d._get_default_store()
    others = {f"rank {rank} has raised" for rank in range(dist.get_world_size())} - {f"rank {absent} has raised"}
    if dist.get_rank() == absent:
        store.wait(sorted(others))
        return None
    for own in channel._living:
        for group in own.groups:
            group._set_default_timeout(timedelta(seconds=3))
    outcome = trainer.last_step()
    store.set(f"rank {dist.get_rank()} has raised", "")
    return outcome


@pytest.mark.ranks
def test_a_rank_stays_away() -> None:
    """The process group's timeout holds, although waiting listens for calls meanwhile."""
    found = run(3, step_without, 1, fresh=True, after=ready())
    for outcome in (found[0], found[2]):
        assert outcome.ours
        assert "a collective of this step failed; no answer from rank 1" in outcome.said
        assert outcome.changed == []


def test_ranks_that_hear_of_a_failure_are_told_what_to_do() -> None:
    """Of ranks that wait in vain one fails first; the others quote it."""
    told = failed_on(2, CanzonaError("a collective of this step failed", hint="look at the output of the other ranks"))
    assert str(RankMismatch(str(told))).startswith("the step failed on rank 2: CanzonaError: a collective of this step")
    assert "hint: look at the output of the other ranks" in str(RankMismatch(str(told)))
    assert "hint" not in str(failed_on(2, ValueError("no")))


# -- gradients -------------------------------------------------------------------------------------

GRADIENT_CASES = [
    [Case("fsdp", (3,))],
    [Case("ddp", (3,))],
    [Case("hsdp", (2, 2))],
    [Case("fsdp", (4,)), Case("hsdp", (2, 2))],
    [Case("tp_alone", (2, 2)), Case("fsdp", (4,))],
]


GAPS: dict[str, dict[int, list[int]]] = {  # by step, the parameters without a gradient
    "once": {3: [1]},
    "at first": {0: [0, 2], 1: [2], 4: [3]},
    "all": {2: [0, 1, 2, 3]},
    "all at first": {0: [0, 1, 2, 3]},
    "never": {step: [1] for step in range(6)},
}


def names(value: Any) -> str:
    return " and ".join(map(str, value)) if isinstance(value, list) else str(value)


def step_missing(
    cases: list[Case],
    steps: int,
    missing: dict[int, list[int]],
    strategy: str = "owner",
    late: float = 0.0,
    **options: Any,
) -> Outcome:
    """After some steps, `missing` maps ranks to the parameters that get no gradient there.

    These ranks come `late` seconds after the others.
    """
    trainer = Trainer(*cases, strategy=strategy, **options)
    trainer.go(steps)
    trainer.feed()
    for i in missing.get(dist.get_rank(), []):
        trainer.params[i].grad = None
        time.sleep(late)
    return trainer.last_step()


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("cases", "steps"), only([([Case("fsdp", (3,))], 2), (GRADIENT_CASES[4], 2)], GRADIENT_CASES, [2, 0]), ids=names
)
def test_gradient_missing_on_one_rank(cases: list[Case], steps: int) -> None:
    found = run(cases[0].world, step_missing, cases, steps, {1: [1]}, fresh=True, after=ready())
    check(found, {"InvalidGradient", "RankMismatch"}, "second", "gradient")


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("cases", "late"),
    [
        *only([([Case("ddp", (3,))], 1.5)], GRADIENT_CASES[:3], [0.0, 1.5]),
        *(full(GRADIENT_CASES[3], late) for late in (0.0, 1.5)),
    ],
    ids=names,
)
def test_gradient_missing_where_every_rank_computes_everything(cases: list[Case], late: float) -> None:
    """Under DDP such a step moves no tensor at all; still no rank may update alone."""
    found = run(cases[0].world, step_missing, cases, 2, {1: [1]}, "replicated", late, fresh=True, after=ready())
    check(found, {"InvalidGradient", "RankMismatch"}, "second", "gradient")


@pytest.mark.ranks
@pytest.mark.parametrize("others", [[], [Case("fsdp", (2,))]], ids=["alone", "beside fsdp"])
def test_gradient_of_a_tensor_of_one_rank(others: list[Case]) -> None:
    """What belongs to one rank alone concerns no other: rank 1 skips the parameter, rank 0 does not."""
    kept, skipped = run(2, step_missing, [Case("plain", (2,)), *others], 2, {1: [0]}, "auto", after=ready())
    everything = [f"{what}{name}" for what in ("", "momentum_buffer of ") for name in NAMES]
    assert (kept.error, sorted(kept.changed)) == ("", sorted(everything))
    assert (skipped.error, sorted(skipped.changed)) == ("", sorted(n for n in everything if "first" not in n))


@pytest.mark.ranks
@pytest.mark.parametrize("cases", [GRADIENT_CASES[0], GRADIENT_CASES[1]], ids=names)
def test_gradient_missing_on_one_rank_counts_as_zeros(cases: list[Case]) -> None:
    """The fragments of that rank have no gradient; all ranks take the step."""
    for outcome in run(3, step_missing, cases, 2, {1: [1]}, missing_grads="zero", after=ready()):
        assert outcome.error == ""
        assert {"first", "third", "fourth"} <= set(outcome.changed)


@pytest.mark.ranks
def test_different_gradients_missing() -> None:
    """Ranks that all see a change, but not the same one."""
    found = run(3, step_missing, [Case("fsdp", (3,))], 2, {0: [2], 1: [1], 2: [1]}, fresh=True, after=ready())
    check(found, {"InvalidGradient", "RankMismatch"}, "second", "third")


def train_with_gaps(cases: list[Case], gaps: dict[int, list[int]]) -> None:
    """Six steps; `gaps` maps steps to parameters without a gradient there, on every rank."""
    trainer = Trainer(*cases, strategy="owner")
    for step in range(6):
        trainer.feed(*gaps.get(step, []))
        trainer.take()
    trainer.check()


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("cases", "when"), crossed([GRADIENT_CASES[0], GRADIENT_CASES[1], GRADIENT_CASES[3]], list(GAPS)), ids=names
)
def test_gradient_missing_on_all_ranks(cases: list[Case], when: str) -> None:
    """The parameter is skipped, as the plain optimizer does."""
    run(cases[0].world, train_with_gaps, cases, GAPS[when], after=ready())


def train_slowly(ranks: int) -> list[bool]:
    """In the third step all ranks lack a gradient, and rank 1 starts its collectives seconds later."""
    trainer = Trainer(Case("fsdp", (ranks,)))
    trainer.go(2)
    trainer.feed()
    before = [local(param).clone() for param in trainer.params]
    trainer.params[1].grad = None
    original = dist.all_to_all_single

    def late(*args: Any, **kwargs: Any) -> Any:
        time.sleep(2.5)
        return original(*args, **kwargs)

    if dist.get_rank() == 1:
        dist.all_to_all_single = late
    try:
        trainer.optimizer.step()
    finally:
        dist.all_to_all_single = original
    return [torch.equal(x, local(y)) for x, y in zip(before, trainer.params, strict=True)]


@pytest.mark.ranks
def test_waiting_long_after_an_agreed_change() -> None:
    """Who waits listens for calls, but the call that led to the agreement is none to fail for."""
    assert run(2, train_slowly, 2, after=ready()) == [[False, True, False, False]] * 2


def sparse(param: Tensor) -> Tensor:
    return torch.eye(*param.shape).to_sparse()


def double(param: Tensor) -> Tensor:
    return torch.zeros(param.shape, dtype=torch.float64)


def whole(param: Tensor) -> Tensor:
    """A gradient that was not reduced to this rank's fragment."""
    assert isinstance(param, DTensor)
    return DTensor.from_local(torch.ones(param.shape), param.device_mesh, [Replicate()])


def step_bad(cases: list[Case], steps: int, make: Callable[[Tensor], Tensor]) -> Outcome:
    """After some steps rank 1 has a gradient for its second parameter that is none."""
    trainer = Trainer(*cases, strategy="owner")
    trainer.go(steps)
    trainer.feed()
    if dist.get_rank() == 1:
        param = trainer.params[1]
        param.grad = None
        param.grad_dtype = None
        param.grad = make(param)
    return trainer.last_step()


BAD: dict[str, tuple[list[Case], Callable[[Tensor], Tensor], list[str]]] = {
    "sparse": ([Case("ddp", (3,))], sparse, ["second", "sparse"]),
    "dtype": ([Case("ddp", (3,))], double, ["second"]),
    "layout": (GRADIENT_CASES[3], whole, ["second", "Replicate"]),
    "layout on one mesh": (GRADIENT_CASES[4], whole, ["second", "Replicate"]),
}


@pytest.mark.ranks
@pytest.mark.parametrize(("kind", "steps"), crossed(list(BAD), [2, 0], most=2))
def test_bad_gradient_on_one_rank(kind: str, steps: int) -> None:
    cases, make, words = BAD[kind]
    found = run(cases[0].world, step_bad, cases, steps, make, fresh=True, after=ready())
    check(found, {"InvalidGradient", "RankMismatch"}, *words)


def train_nan(ranks: int) -> list[bool]:
    """A gradient that is not a number in one element, in the second of three steps; where there are such."""
    trainer = Trainer(Case("fsdp", (ranks,)))
    for step in range(3):
        trainer.feed()
        if step == 1:
            grad = params_of(trainer.plain)[2].grad
            assert grad is not None
            grad[5, 5] = torch.nan
            trainer.share()
        trainer.take()
    same, whole = [], [param.detach() for param in params_of(trainer.plain)]
    for i, mine in enumerate(trainer.params):
        expected = trainer.laid.fragment(whole[i], i)
        assert bool(expected.isnan().any()) == (i == 2)
        same.append(torch.equal(local(mine).isnan(), expected.isnan()))
        same.append(torch.equal(local(mine).nan_to_num(), expected.nan_to_num()))
    return same


@pytest.mark.ranks
def test_not_a_number() -> None:
    """It does to its matrix what it does in the plain optimizer, and to no other."""
    assert run(2, train_nan, 2, after=ready()) == [[True] * 8] * 2
