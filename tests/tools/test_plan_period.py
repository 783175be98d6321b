"""Optimizers that do some work every few steps: a plan shows the mean of a period, and the heaviest step by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import canzona_compile
from tests.harness.toys import Refreshing

EVERY = 3  # steps of the toy


def planned(optimizer: Any) -> canzona_compile.OfflinePlan:
    shapes = {f"layers.{i}": [256, 512] for i in range(4)}
    return canzona_compile.plan(
        shapes, mesh="fsdp=2", optimizer=optimizer, hardware="cpu", strategy="owner", alternatives=False
    )


def test_the_steps_of_a_period() -> None:
    made = planned(Refreshing)
    period = made.forecast.period
    assert period is not None
    light, heavy = min(period.seconds), max(period.seconds)
    assert sorted(period.seconds) == [*[light] * (EVERY - 1), heavy]
    assert heavy > 2 * light
    assert period.worst == heavy == made.forecast.simulation.seconds
    assert period.mean == pytest.approx((heavy + light * (EVERY - 1)) / EVERY)
    for text in (made.to_text(), made.to_markdown()):
        assert all(words in text for words in ("mean of", f"{EVERY} steps", "heaviest"))
    assert json.loads(made.to_json())["forecast"]["period"]["worst"] == heavy


@pytest.mark.full
@pytest.mark.parametrize("name", ["soap", "shampoo"])
def test_the_optimizers_that_people_plan_with_have_periods(name: str) -> None:
    made = planned(name)
    period = made.forecast.period
    assert period is not None
    assert period.mean < period.worst == max(period.seconds)


def test_steps_alike_have_no_period() -> None:
    made = planned(torch.optim.Muon)
    assert made.forecast.period is None
    assert "mean of" not in made.to_text()
