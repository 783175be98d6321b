"""Optimizers of schedulefree on ranks."""

from __future__ import annotations

import pytest

from tests.harness.marks import first
from tests.harness.published import CASE, Published, check, imported, verdict
from tests.harness.ranks import run

schedulefree = imported("schedulefree")

OPTIMIZERS = (
    Published("AdamWScheduleFree", {"lr": 0.01, "foreach": False}),
    Published("SGDScheduleFree", {"lr": 0.01, "foreach": False}),
    Published("RAdamScheduleFree", {"lr": 0.01, "foreach": False}),
)


def on_rank(index: int) -> str:
    return verdict(OPTIMIZERS[index], schedulefree)


@pytest.mark.ranks
@pytest.mark.parametrize("index", first(range(len(OPTIMIZERS))), ids=lambda index: str(OPTIMIZERS[index]))
def test_optimizer(index: int) -> None:
    check(run(CASE.world, on_rank, index), OPTIMIZERS[index])
