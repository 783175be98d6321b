"""Optimizers of HeavyBall on ranks."""

from __future__ import annotations

import pytest

from tests.harness.marks import first
from tests.harness.published import CASE, Published, check, imported, verdict
from tests.harness.ranks import run

heavyball = imported("heavyball")
heavyball.utils.compile_mode = None  # Inductor would take a minute for each

KEPT = "knows parameters"  # it calls a method of the optimizer that it has kept, with all parameters

OPTIMIZERS = (
    Published("AdamW", {"lr": 0.01}, KEPT),
    Published("Muon", {"lr": 0.01}, KEPT),
    Published("SOAP", {"lr": 0.01}, KEPT),
    Published("PSGDKron", {"lr": 0.01}, KEPT),
)


def on_rank(index: int) -> str:
    return verdict(OPTIMIZERS[index], heavyball)


@pytest.mark.ranks
@pytest.mark.parametrize("index", first(range(len(OPTIMIZERS))), ids=lambda index: str(OPTIMIZERS[index]))
def test_optimizer(index: int) -> None:
    check(run(CASE.world, on_rank, index), OPTIMIZERS[index])
