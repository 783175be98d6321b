"""Training under zero1 gives the bits of plain optimizers."""

from __future__ import annotations

import pytest
import torch

from tests.data_parallel.models import MAKERS
from tests.data_parallel.runs import compare_with_ddp, compare_with_plain
from tests.harness.marks import crossed, full
from tests.harness.ranks import run

BUCKETS = 40_000  # bytes: several buckets, uniform and uneven ones
DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize(("make", "dtype", "gather"), crossed(list(MAKERS), DTYPES, ["step", "forward"]))
def test_two_ranks_train_as_under_ddp(make: str, dtype: torch.dtype, gather: str) -> None:
    """A sum of two gradients has no order, so the whole run is that of DDP with the plain optimizer, bit for bit."""
    for found in run(2, compare_with_ddp, make, 6, dtype, accumulate=2, bucket_bytes=BUCKETS, gather=gather):
        assert found == []


@pytest.mark.parametrize("world", [3, full(4)])
@pytest.mark.parametrize("make", list(MAKERS))
def test_reduced_gradients_give_the_plain_step(world: int, make: str) -> None:
    for found in run(world, compare_with_plain, make, 5, clip=0.5, accumulate=2, bucket_bytes=BUCKETS):
        assert found == []
