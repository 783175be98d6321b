"""What one rank does wrong, every rank hears of: an error that says what, and nothing half updated."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from canzona_compile.errors import CanzonaError, RankMismatch
from canzona_compile.ir.pipeline import PassRecord
from canzona_compile.replica.raised import failed_on
from canzona_compile.runtime import channel
from tests.harness.layouts import Case, local
from tests.harness.marks import crossed, first
from tests.harness.mistakes import Mistakes
from tests.harness.pairs import params_of
from tests.harness.ranks import run
from tests.harness.trainer import Outcome, Trainer, ready

MISTAKES = Mistakes(__name__, driver=Trainer, after=ready(), when="fed")

# -- a rank dies -----------------------------------------------------------------------------------


class Again(Trainer):
    """Steps once more: a rank may share no collective with the victim until then, and has updated something."""

    def course(self) -> Iterator[str]:
        yield from super().course()
        self.optimizer.step()

    def tensors(self) -> dict[str, Tensor]:
        return {}


def die(_: Trainer, call: int) -> None:
    """End at the all-to-all of this number."""
    original, calls = dist.all_to_all_single, 0

    def deadly(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        if calls == call:
            os._exit(7)
        calls += 1
        return original(*args, **kwargs)

    dist.all_to_all_single = deadly


DEATHS = [  # who dies, and at which call
    ("before the gather", Case("fsdp", (3,)), 1, 0),
    ("before the exchange", Case("hsdp", (2, 2)), 2, 2),
    ("before the scatter", Case("fsdp", (3,)), 0, 1),
    ("replicas", Case("ddp", (3,)), 2, 0),
    ("of 8, before the gather", Case("fsdp", (8,)), 3, 0),
    ("of 8, before the scatter", Case("fsdp", (8,)), 0, 1),
    ("of 8, before the exchange", Case("hsdp", (2, 4)), 6, 2),
    ("of 8, replicas", Case("ddp", (8,)), 7, 0),
]
for name, case, victim, call in DEATHS:
    MISTAKES(
        f"no answer from rank {victim}",
        name=name,
        group="deaths",
        driver=Again if case.layout == "hsdp" else Trainer,
        cases=[case],
        options={"strategy": "owner"},
        errors={"CanzonaError", "RankMismatch"},
        on=[victim],
        dying=[victim],
    )(partial(die, call=call))


@pytest.mark.parametrize("name", first(MISTAKES.names("deaths"), 2))
def test_a_rank_dies_in_mid_step(name: str) -> None:
    MISTAKES.check(name)


def observe(trainer: Trainer) -> None:
    """Raise when the program of the first step was emitted, before ranks connect."""

    def fail(record: PassRecord) -> None:
        if record.name == "emit":
            raise ValueError("the disk is full")

    trainer.optimizer.canzona.session.observers.append(fail)


for strategy in ("owner", "replicated"):
    MISTAKES(
        name=strategy,
        says={0: "failed on rank 1: ValueError: the disk is full", 1: "the disk is full"},
        cases=[Case("fsdp", (2,))],
        options={"good": 0, "strategy": strategy},
        errors={"RankMismatch", "ValueError"},
        on=[1],
    )(observe)


@pytest.mark.parametrize("strategy", ["owner", "replicated"])
def test_a_rank_fails_while_it_makes_the_program(strategy: str) -> None:
    MISTAKES.check(strategy)


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


def test_not_a_number() -> None:
    """It does to its matrix what it does in the plain optimizer, and to no other."""
    assert run(2, train_nan, 2, after=ready()) == [[True] * 8] * 2
