"""Whole rank programs with generated kernels, in Triton's interpreter, on real ranks: the plain optimizer's bits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch

from tests.codegen.pointwise import generating, kernels_of
from tests.harness.layouts import ALONE, Case
from tests.harness.marks import full
from tests.harness.optimizers import GroupSpec, Scheduler, muon, param_groups, shapes_of
from tests.harness.ranks import run
from tests.harness.training import Training, trained

pytest.importorskip("triton")

STEPS = 3  # the first is eager
# Two that batch and are aligned, and one that ranks cannot share evenly, with numbers of its own.
GROUPS = (
    GroupSpec(((64, 48),) * 2, {"nesterov": True}),
    GroupSpec(((5, 40),), {"nesterov": False, "adjust_lr_fn": "match_rms_adamw", "lr": 3e-3}),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a rank found: bits other than the plain run's, launches per step of every kernel, micro-groups."""

    different: list[str]
    launches: dict[str, float]
    groups: int


TRAINING = Training(
    lambda params: muon(param_groups(GROUPS, params)),
    tuple(shapes_of(GROUPS)),
    STEPS,
    schedule=lambda optimizer: Scheduler(optimizer).set,
    sizes=(0.1, 1e-3),
)


def train(case: Case, dtype: torch.dtype, options: dict[str, Any]) -> Outcome:
    with generating():
        optimizer, found = trained(TRAINING, [case], dtype, **options)
    launches = {name: kernel.launches / (STEPS - 1) for name, kernel in kernels_of(optimizer).items()}
    assert optimizer.canzona.step.program.eager == {}
    return Outcome(found.different, launches, len(optimizer.canzona.step.micro_groups))


def train_alone(dtype: torch.dtype) -> None:
    trained(TRAINING, [ALONE], dtype)


@pytest.mark.parametrize(
    ("case", "dtype", "options", "stages"),
    [
        full(Case("fsdp", (4,)), torch.float32, {"strategy": "owner", "micro_groups": 2}, "prepare unpack pack apply"),
        (Case("fsdp", (2,)), torch.bfloat16, {"strategy": "owner"}, "prepare unpack pack apply"),
        full(Case("hsdp", (2, 2)), torch.float32, {"strategy": "owner"}, "prepare unpack pack forward apply"),
        full(Case("tp_columns", (2,)), torch.float32, {"strategy": "owner"}, "prepare unpack pack apply"),
        full(Case("fsdp", (2,)), torch.float32, {"strategy": "replicated"}, "prepare unpack apply"),
        full(Case("ddp", (2,)), torch.float32, {"strategy": "owner"}, "pack apply"),  # gradients are there already
    ],
    ids=lambda value: str(value) if isinstance(value, Case | torch.dtype) else "",
)
def test_muon(case: Case, dtype: torch.dtype, options: dict[str, Any], stages: str) -> None:
    """Equal bits; per micro-group and step one launch for each stage that there is on a rank."""
    outcomes = run(case.world, train, case, dtype, options, after=partial(train_alone, dtype))
    assert [o.different for o in outcomes] == [[]] * case.world
    for outcome in outcomes:
        assert set(outcome.launches.values()) == {1.0}
        for group in range(outcome.groups):
            assert f"g{group}_apply" in outcome.launches
    seen = {name.split("_", 1)[1] for outcome in outcomes for name in outcome.launches}
    assert seen == set(stages.split())
