"""Optimizers of HeavyBall on ranks."""

from __future__ import annotations

import pytest

from tests.harness.marks import first
from tests.harness.published import CASE, DRAWN, Published, check, imported, verdict
from tests.harness.ranks import run

heavyball = imported("heavyball")
heavyball.utils.compile_mode = None  # Inductor would take a minute for each

OPTIMIZERS = (
    Published("AdamW", {"lr": 0.01}),
    Published("Muon", {"lr": 0.01}, DRAWN),
    Published("SOAP", {"lr": 0.01}),
    Published("PSGDKron", {"lr": 0.01}, DRAWN, shapes=((16, 24), (24, 8))),
)


def on_rank(index: int) -> str:
    return verdict(OPTIMIZERS[index], heavyball)


@pytest.mark.ranks
@pytest.mark.parametrize("index", first(range(len(OPTIMIZERS))), ids=lambda index: str(OPTIMIZERS[index]))
def test_optimizer(index: int) -> None:
    check(run(CASE.world, on_rank, index), OPTIMIZERS[index])
