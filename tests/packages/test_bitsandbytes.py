"""Optimizers of bitsandbytes on ranks."""

from __future__ import annotations

import pytest

from tests.harness.marks import first
from tests.harness.published import CASE, Published, check, imported, verdict
from tests.harness.ranks import run

bitsandbytes = imported("bitsandbytes.optim")

LARGE = ((65, 64), (64, 130))  # smaller ones keep 32 bits

OPTIMIZERS = (
    Published("AdamW8bit", {"lr": 0.01}, shapes=LARGE),
    Published("AdamW", {"lr": 0.01}),
    Published("Lion8bit", {"lr": 0.01}, shapes=LARGE),
)


def on_rank(index: int) -> str:
    return verdict(OPTIMIZERS[index], bitsandbytes)


@pytest.mark.ranks
@pytest.mark.parametrize("index", first(range(len(OPTIMIZERS))), ids=lambda index: str(OPTIMIZERS[index]))
def test_optimizer(index: int) -> None:
    check(run(CASE.world, on_rank, index), OPTIMIZERS[index])
