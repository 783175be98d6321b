"""Training under zero1 gives the bits of plain optimizers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.data_parallel.models import MAKERS
from tests.data_parallel.runs import compare_with_ddp, compare_with_plain
from tests.harness.marks import crossed
from tests.harness.ranks import run

BUCKETS = 40_000  # bytes: several buckets, uniform and uneven ones
DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize(("make", "dtype", "gather"), crossed(list(MAKERS), DTYPES, ["step", "forward"], most=2))
def test_two_ranks_train_as_under_ddp(make: str, dtype: torch.dtype, gather: str) -> None:
    """A sum of two gradients has no order, so the whole run is that of DDP with the plain optimizer, bit for bit."""
    for found in run(2, compare_with_ddp, make, 6, dtype, accumulate=2, bucket_bytes=BUCKETS, gather=gather):
        assert found == []


@pytest.mark.parametrize(("world", "make"), crossed([3, 4], list(MAKERS), most=0))
def test_reduced_gradients_give_the_plain_step(world: int, make: str) -> None:
    for found in run(world, compare_with_plain, make, 5, clip=0.5, accumulate=2, bucket_bytes=BUCKETS):
        assert found == []


@pytest.mark.parametrize(
    ("make", "mesh"),
    crossed(list(MAKERS), [{"tp": 2}, {"replicas": 2}, {"tp": 2, "gather": "forward"}], most=1),
)
def test_beside_tensor_parallelism_and_in_replicas(make: str, mesh: dict[str, Any]) -> None:
    for found in run(4, compare_with_plain, make, 4, clip=0.5, bucket_bytes=BUCKETS, **mesh):
        assert found == []


@pytest.mark.full
def test_one_rank_alone() -> None:
    assert run(1, compare_with_plain, "muon and adamw", 3, clip=0.5, bucket_bytes=BUCKETS) == [[]]


@pytest.mark.full
def test_twenty_steps_with_a_schedule_clipping_and_accumulation() -> None:
    """No parameter of this model is cut, so that torch's norm has the bits of ours."""
    options = {"clip": 0.5, "accumulate": 2, "vocabulary": 200, "bucket_bytes": BUCKETS}
    for found in run(2, compare_with_ddp, "muon and adamw", 20, **options):
        assert found == []
