"""The figures of docs/reproduction.md that we promise, from the rates that are assumed there."""

from __future__ import annotations

from typing import Any

import pytest

import canzona_compile

PAPER = 0.0717  # seconds of an optimizer step, Qwen3-32B on 256 GPUs


def planned(**options: Any) -> canzona_compile.OfflinePlan:
    return canzona_compile.plan("qwen3-32b", mesh="dp=32,tp=8", updates="zero1", alternatives=False, **options)


def test_owners_by_the_alpha_rule_take_what_the_paper_says() -> None:
    found = planned(split="none", planner="alpha", strategy="owner").forecast
    assert found.simulation.seconds == pytest.approx(PAPER, rel=0.20)
    assert found.matrices == 256


@pytest.mark.full
def test_the_best_plan_takes_30_ms_and_is_balanced_otherwise() -> None:
    best = planned(numerics="fast").forecast
    assert best.simulation.seconds <= 0.030
    assert {t.strategy for t in best.tasks} == {"owner"}  # owners iterate on Gram matrices, which a run does as well
    whole = planned(strategy="owner").forecast
    assert whole.imbalance <= 1.10
    assert whole.simulation.seconds > best.simulation.seconds
