"""Ranks that made different plans hear of it before the first collective: the first difference, on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from tests.layouts import Case
from tests.ranks import run
from tests.trainer import SHAPES, Outcome, Trainer, check


def label(value: Any) -> str:
    return " and ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else ""


def first_step(case: Case, differ: dict[str, Any]) -> Outcome:
    """The first step, with something else on rank 1."""
    odd = dist.get_rank() == 1
    shapes = differ.get("shapes", SHAPES) if odd else SHAPES
    options = differ.get("options", {}) if odd else {}
    trainer = Trainer(case, shapes=shapes, **options)
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
    trainer.gradients()
    return trainer.last_step()


@pytest.mark.ranks
@pytest.mark.parametrize("case", [Case("fsdp", (3,)), Case("ddp", (2,))], ids=str)
@pytest.mark.parametrize(
    ("differ", "words"),
    [
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
    ],
    ids=label,
)
def test_ranks_that_differ(case: Case, differ: dict[str, Any], words: list[str]) -> None:
    found = run(case.world, first_step, case, differ, fresh=True)
    check(found, {"RankMismatch"}, "difference", "rank 1", *words)
