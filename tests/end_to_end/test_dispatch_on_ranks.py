"""Optimizers that Dynamo cannot trace, on ranks: captured by dispatch, with owners, and with the plain bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

from tests.harness import compiled_optimizers as compiled
from tests.harness import toys
from tests.harness.layouts import Case
from tests.harness.marks import first
from tests.harness.optimizers import Shape
from tests.harness.training import Outcome, Training, check, on_ranks
from tests.harness.training import train as train_recipe

SHAPES: tuple[Shape, ...] = ((17, 32), (48, 20), (17, 32), (16, 16))
DECORATED = (toys.DecoratedMuon, toys.DecoratedBasis, toys.TwoPrecisions, toys.OnePrecision)
COMPILED = (compiled.CompiledAdam, compiled.CompiledParts, compiled.CompiledProducts)
HIDDEN = (compiled.Pulling, compiled.Hidden)
KINDS: dict[str, type[Optimizer]] = {kind.__name__: kind for kind in (*DECORATED, *COMPILED, *HIDDEN)}


def decay(optimizer: Optimizer) -> Callable[[int], None]:
    """A learning rate that changes on every step."""

    def change(step: int) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (1 + step)

    return change


def train(name: str, cases: Sequence[Case], dtype: torch.dtype, **options: Any) -> Outcome:
    training = Training(KINDS[name], SHAPES, steps=7, schedule=decay, sizes=(0.1, 1e-2))
    return train_recipe(training, cases, dtype, **options)


@pytest.mark.ranks
@pytest.mark.parametrize(
    "case", first([Case("fsdp", (3,)), Case("fsdp", (2,)), Case("tp_columns", (2,)), Case("ddp", (2,))]), ids=str
)
@pytest.mark.parametrize("recipe", first(kind.__name__ for kind in (*DECORATED, *COMPILED)))
def test_captured_by_dispatch(recipe: str, case: Case) -> None:
    report = check(on_ranks(train, recipe, [case], torch.float32, strategy="owner"))
    assert report["fallbacks"] == {}
    assert {task["strategy"] for task in report["tasks"]} == {"owner"}


@pytest.mark.ranks
@pytest.mark.parametrize("recipe", first(["DecoratedMuon", "DecoratedBasis"]))
def test_captured_by_dispatch_with_a_loaded_state(recipe: str) -> None:
    check(on_ranks(train, recipe, [Case("fsdp", (2,))], torch.float32, restored=True))


@pytest.mark.ranks
@pytest.mark.parametrize("recipe", first(kind.__name__ for kind in HIDDEN))
def test_compiled_functions_that_graphs_cannot_call(recipe: str) -> None:
    check(on_ranks(train, recipe, [Case("fsdp", (3,))], torch.float32, strategy="owner"), fallbacks=True)
