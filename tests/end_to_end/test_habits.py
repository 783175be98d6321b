"""What published optimizers do beside the mathematics: each habit is followed bit for bit, or refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

import canzona_compile
from canzona_compile.errors import UnsupportedOptimizer
from tests.harness import toy_habits as toys
from tests.harness.marks import first
from tests.harness.pairs import Pair, different, feed, muon, parameters, params_of

COMPILED = (
    toys.Columns,
    toys.Optional,
    toys.Subtracting,
    toys.Debiasing,
    toys.CountingInState,
    toys.RootOfNorm,
    toys.FreshAverage,
)


@pytest.mark.parametrize("kind", first(COMPILED, 4))
def test_compiled(kind: type[Optimizer]) -> None:
    pair = Pair(kind, captures_anew=True)
    for step in range(10):
        pair.set("lr", 0.1 / (1 + step))
        pair.step()
        if step == 2:
            captures = pair.report.captures
    assert (pair.report.captures, pair.report.fallbacks) == (captures, {})
    assert captures <= 3 * 2


def test_squares_are_elementwise() -> None:
    pair = Pair(toys.Squaring)
    pair.steps(5)
    assert pair.report.tasks == ()


def test_another_formula_for_foreach_is_not_taken_for_the_same() -> None:
    pair = Pair(toys.AnyForeach)
    pair.steps(3)
    assert all("bits of its eager step" in why for why in pair.report.fallbacks.values())
    assert len(pair.report.fallbacks) == 2


def test_interpreted_tasks_count_too() -> None:
    pair = Pair(toys.DebiasingOnHost)
    pair.steps(5)
    assert len(pair.report.fallbacks) == 2
    assert [g["step"] for o in pair.both for g in o.param_groups] == [5, 5]


@pytest.mark.full
def test_counters_in_the_state_are_kept_in_checkpoints() -> None:
    pair = Pair(toys.CountingInState)
    pair.steps(3)
    assert [o.state_dict()["state"]["k"] for o in pair.both] == [3, 3]
    for optimizer in pair.both:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    pair.steps(3)


@pytest.mark.full
@pytest.mark.parametrize("replan", first([False, True]))
def test_hyperparameters_that_decided_about_the_state_change_too_late(replan: bool) -> None:
    pair = Pair(toys.Optional)
    pair.steps(3)
    pair.set("averaged", False)
    if replan:
        for optimizer in pair.both:
            optimizer.load_state_dict(optimizer.state_dict())
    pair.steps(4)
    assert pair.report.fallbacks == {}


def test_wrappers_of_optimizers_are_refused() -> None:
    with pytest.raises(UnsupportedOptimizer, match="passes its parameters on") as caught:
        canzona_compile.wrap(toys.Delegating(muon(parameters())))
    assert "wrap the optimizer inside it" in str(caught.value)


@pytest.mark.full
def test_state_that_is_wider_than_its_parameter_is_loaded_as_it_was() -> None:
    """torch casts it to the parameter's dtype."""

    def made() -> Any:
        return canzona_compile.wrap(Wide(parameters(dtype=torch.bfloat16)))

    first, second = made(), made()
    for step in range(2):
        feed(first, step)
        first.step()
    for own, other in zip(params_of(first), params_of(second), strict=True):
        other.data.copy_(own)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for step in range(2, 5):
        for optimizer in (first, second):
            feed(optimizer, step)
            optimizer.step()
    assert different(first, second) == []
    assert {s["average"].dtype for s in second.state.values()} == {torch.float32}


class Wide(toys.PerParameter):
    """Averages of 16-bit gradients in 32 bits."""

    def update(self, param: torch.Tensor, grad: torch.Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        average = state.setdefault("average", torch.zeros_like(param, dtype=torch.float32))
        average.lerp_(grad.float(), 0.1)
        param.add_(toys.cube(average).to(param.dtype), alpha=-group["lr"])
