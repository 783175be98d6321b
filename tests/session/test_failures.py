"""What one rank does wrong, every rank hears of: an error that says what, and nothing half updated."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from canzona_compile.errors import CanzonaError, RankMismatch
from canzona_compile.replica.raised import failed_on
from canzona_compile.runtime import channel
from tests.harness.layouts import Case, local
from tests.harness.marks import crossed
from tests.harness.pairs import params_of
from tests.harness.ranks import Died, run
from tests.harness.trainer import Outcome, Trainer, ready

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

GRADIENT_CASES = [[Case("fsdp", (3,))], [Case("ddp", (3,))], [Case("fsdp", (4,)), Case("hsdp", (2, 2))]]
GAPS: dict[str, dict[int, list[int]]] = {  # by step, the parameters without a gradient
    "once": {3: [1]},
    "at first": {0: [0, 2], 1: [2], 4: [3]},
    "all": {2: [0, 1, 2, 3]},
    "all at first": {0: [0, 1, 2, 3]},
    "never": {step: [1] for step in range(6)},
}


def train_with_gaps(cases: list[Case], gaps: dict[int, list[int]]) -> None:
    """Six steps; `gaps` maps steps to parameters without a gradient there, on every rank."""
    trainer = Trainer(*cases, strategy="owner")
    for step in range(6):
        trainer.feed(*gaps.get(step, []))
        trainer.take()
    trainer.check()


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("cases", "when"),
    crossed(GRADIENT_CASES, list(GAPS)),
    ids=lambda v: v if isinstance(v, str) else " and ".join(map(str, v)),
)
def test_gradient_missing_on_all_ranks(cases: list[Case], when: str) -> None:
    """The parameter is skipped, as the plain optimizer does."""
    run(cases[0].world, train_with_gaps, cases, GAPS[when], after=ready())


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
