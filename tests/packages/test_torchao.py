"""Optimizers of torchao on ranks."""

from __future__ import annotations

import pytest

from tests.harness.marks import first
from tests.harness.published import CASE, Published, check, imported, verdict
from tests.harness.ranks import run

torchao = imported("torchao.optim")

BLOCKS = ((66, 128),)  # whole blocks, others keep 32 bits; one shape, because Inductor compiles each

OPTIMIZERS = (
    Published("AdamW8bit", {"lr": 0.01}, shapes=BLOCKS),
    Published("AdamW4bit", {"lr": 0.01}, shapes=BLOCKS),
)


def on_rank(index: int) -> str:
    return verdict(OPTIMIZERS[index], torchao)


@pytest.mark.ranks
@pytest.mark.parametrize("index", first(range(len(OPTIMIZERS))), ids=lambda index: str(OPTIMIZERS[index]))
def test_optimizer(index: int) -> None:
    check(run(CASE.world, on_rank, index), OPTIMIZERS[index])
