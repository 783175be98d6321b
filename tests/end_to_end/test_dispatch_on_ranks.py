"""Optimizers that Dynamo cannot trace, on ranks: captured by dispatch, with owners, and with the plain bits."""

from __future__ import annotations

import pytest
from torch.optim import Optimizer

from tests.harness import compiled_optimizers as compiled
from tests.harness import toys
from tests.harness.layouts import Case
from tests.harness.marks import first
from tests.harness.optimizers import Shape
from tests.harness.training import Training, check, falling, on_ranks

SHAPES: tuple[Shape, ...] = ((17, 32), (48, 20), (17, 32), (16, 16))
DECORATED = (toys.DecoratedMuon, toys.DecoratedBasis, toys.TwoPrecisions, toys.OnePrecision)
COMPILED = (compiled.CompiledAdam, compiled.CompiledParts, compiled.CompiledProducts)
HIDDEN = (compiled.Pulling, compiled.Hidden)
KINDS: dict[str, type[Optimizer]] = {kind.__name__: kind for kind in (*DECORATED, *COMPILED, *HIDDEN)}


TRAININGS = {
    name: Training(kind, SHAPES, steps=7, schedule=falling(0.1), sizes=(0.1, 1e-2)) for name, kind in KINDS.items()
}


@pytest.mark.parametrize(
    "case", first([Case("fsdp", (3,)), Case("fsdp", (2,)), Case("tp_columns", (2,)), Case("ddp", (2,))]), ids=str
)
@pytest.mark.parametrize("recipe", first(kind.__name__ for kind in (*DECORATED, *COMPILED)))
def test_captured_by_dispatch(recipe: str, case: Case) -> None:
    report = check(on_ranks(__name__, recipe, [case], strategy="owner"))
    assert report["fallbacks"] == {}
    assert {task["strategy"] for task in report["tasks"]} == {"owner"}


@pytest.mark.parametrize("recipe", first(["DecoratedMuon", "DecoratedBasis"]))
def test_captured_by_dispatch_with_a_loaded_state(recipe: str) -> None:
    check(on_ranks(__name__, recipe, [Case("fsdp", (2,))], restored=True))


@pytest.mark.parametrize("recipe", first(kind.__name__ for kind in HIDDEN))
def test_compiled_functions_that_graphs_cannot_call(recipe: str) -> None:
    check(on_ranks(__name__, recipe, [Case("fsdp", (3,))], strategy="owner"), fallbacks=True)
