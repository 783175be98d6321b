"""Ranks that made different plans hear of it before the first collective: the first difference, on every rank."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import canzona_compile
from canzona_compile.kernels import tensor_args, tuning_cache
from canzona_compile.kernels.dispatch import CANDIDATES, Problem
from tests.harness.layouts import Case
from tests.harness.marks import only
from tests.harness.ranks import run
from tests.harness.trainer import ALIKE, SHAPES, Outcome, Trainer, check, ready


def label(value: Any) -> str:
    return str(value) if isinstance(value, Case) else " and ".join(f"{k} {v}" for k, v in value[0].items())


def first_step(case: Case, differ: dict[str, Any]) -> Outcome:
    """The first step, with something else on rank 1."""
    odd = dist.get_rank() == 1
    shapes = differ.get("shapes", SHAPES) if odd else SHAPES
    options = differ.get("options", {}) if odd else {}
    trainer = Trainer(case, shapes=shapes, **options)
    trainer.feed()
    group = trainer.optimizer.param_groups[0]
    if odd:
        group.update(differ.get("group", {}))
        order = differ.get("order")
        if order:
            for key in ("params", "param_names"):
                group[key] = [group[key][i] for i in order]
        if "fewer" in differ:
            for key in ("params", "param_names"):
                group[key] = group[key][: differ["fewer"]]
    return trainer.last_step()


DIFFERENCES: list[tuple[dict[str, Any], list[str]]] = [
    ({"options": {"capacity": 4096}}, ["capacity 4096"]),
    ({"options": {"depth": 3}}, ["depth 3"]),
    ({"options": {"micro_groups": 5}}, ["micro_groups 5"]),
    ({"options": {"strategy": "replicated"}}, ["replicated"]),
    ({"options": {"numerics": "fast"}}, ["fast"]),
    ({"order": [1, 0, 2, 3]}, ["first", "second"]),
    ({"order": [3, 1, 2, 0]}, ["first", "fourth"]),
    ({"fewer": 3}, ["fourth"]),
    ({"shapes": ((48, 24), (24, 60), (36, 12), (48, 24))}, ["12x36", "36x12"]),
    ({"group": {"nesterov": False}}, []),
    ({"group": {"adjust_lr_fn": "match_rms_adamw"}}, []),
    ({"group": {"ns_steps": 3}}, []),
]
# One difference of each kind: of an option, of a hyperparameter, of order, number and shapes of parameters.
FAST = [
    *((Case("fsdp", (3,)), DIFFERENCES[i]) for i in (0, 6, 8, 10)),
    *((Case("ddp", (2,)), DIFFERENCES[i]) for i in (3, 7)),
]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("case", "differ"), only(FAST, [Case("fsdp", (3,)), Case("ddp", (2,))], DIFFERENCES), ids=label
)
def test_ranks_that_differ(case: Case, differ: tuple[dict[str, Any], list[str]]) -> None:
    what, words = differ
    found = run(case.world, first_step, case, what, fresh=True, after=ready())
    check(found, {"RankMismatch"}, "difference", "rank 1", *words)


def tuned_on_one_rank(folder: str) -> Outcome:
    """The first step on GPUs of one kind, where one rank's cache folder holds a verdict of the tuner."""
    machine = tuning_cache.GpuKind(90, "H200", 132)
    with (
        mock.patch.dict(os.environ, XDG_CACHE_HOME=f"{folder}/{dist.get_rank()}"),
        mock.patch.object(tensor_args, "machine", return_value=machine),
    ):
        if dist.get_rank() == 1:
            problem = Problem("sym_gemm", 1, 1024, 4096, torch.bfloat16, torch.bfloat16, 16)
            tuning_cache.store(machine, problem, CANDIDATES["sym_gemm", 90][0], {})
        trainer = Trainer(Case("fsdp", (2,)))
        trainer.feed()
        return trainer.last_step()


@pytest.mark.ranks
def test_kernels_that_were_tuned_on_one_rank_only(tmp_path: Path) -> None:
    """Matrices that every rank computes would come out different, and nobody would hear of it."""
    found = run(2, tuned_on_one_rank, str(tmp_path), fresh=True, after=ready())
    check(found, {"RankMismatch"}, "difference", "tuned", "m=1024")


def mended(odd: float | str) -> list[str]:
    """Two steps at a rate that rank 1 alone has, then steps at the right one; what was raised, and what changed."""
    trainer = Trainer(Case("fsdp", (2,)), shapes=ALIKE)
    said = []
    for step in range(4):
        trainer.feed()
        if step == 1:
            if dist.get_rank() == 1:
                trainer.optimizer.param_groups[0]["lr"] = odd
            for _ in range(2):
                outcome = trainer.last_step()
                said += [outcome.error, *outcome.changed]
            trainer.optimizer.param_groups[0]["lr"] = trainer.plain.param_groups[0]["lr"]
        trainer.take()
        trainer.check()
    return said


@pytest.mark.ranks
@pytest.mark.parametrize("odd", ["not a number", -1.0, 0.5])
def test_training_goes_on_once_the_cause_is_gone(odd: float | str) -> None:
    """And not before: the step that plans anew compares numbers, too."""
    first, other = run(2, mended, odd, fresh=True, after=ready())
    assert len(first) == len(other) == 2
    assert {*first, *other} <= {"InvalidGradient", "RankMismatch", "UnsupportedOptimizer", "CanzonaError"}


def of_different_classes() -> str:
    """A step of Muon on rank 0 and SGD on rank 1, then two steps of a Muon on both; what was raised."""
    case = Case("fsdp", (2,))
    wrong = Trainer(case)
    if dist.get_rank() == 1:
        wrong.optimizer = canzona_compile.wrap(torch.optim.SGD(wrong.params, momentum=0.9))
    wrong.feed()
    error = wrong.last_step().error
    trainer = Trainer(case, shapes=ALIKE)
    trainer.go(2)
    trainer.check()
    return error


@pytest.mark.ranks
def test_new_optimizers_plan_after_ranks_made_different_ones() -> None:
    assert run(2, of_different_classes, fresh=True, after=ready()) == ["RankMismatch"] * 2
