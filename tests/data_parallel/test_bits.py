"""Training under zero1 gives the bits of plain optimizers."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from tests.data_parallel.models import MAKERS
from tests.data_parallel.runs import alone, compare_with_ddp, compare_with_plain
from tests.harness.marks import crossed
from tests.harness.ranks import run

STEPS = 20
BUCKETS = 40_000  # bytes: several buckets, uniform and uneven ones
DTYPES = [torch.float32, torch.bfloat16]
LIKE_USERS: dict[str, Any] = {"clip": 0.5, "accumulate": 2, "bucket_bytes": BUCKETS}  # beside a schedule


@pytest.mark.parametrize(("make", "dtype", "gather"), crossed(list(MAKERS), DTYPES, ["step", "forward"], most=1))
def test_two_ranks_train_as_under_ddp(make: str, dtype: torch.dtype, gather: str) -> None:
    """A sum of two gradients has no order, so the whole run is that of DDP with the plain optimizer, bit for bit."""
    after = partial(alone, make, dtype)
    for found in run(2, compare_with_ddp, make, STEPS, dtype, gather=gather, after=after, **LIKE_USERS):
        assert found == []


@pytest.mark.parametrize(("world", "make", "dtype"), crossed([3, 4], list(MAKERS), DTYPES, most=0))
def test_reduced_gradients_give_the_plain_step(world: int, make: str, dtype: torch.dtype) -> None:
    after = partial(alone, make, dtype)
    for found in run(world, compare_with_plain, make, STEPS, dtype, after=after, **LIKE_USERS):
        assert found == []


@pytest.mark.parametrize(
    ("make", "mesh", "dtype"),
    crossed(list(MAKERS), [{"tp": 2}, {"replicas": 2}, {"tp": 2, "gather": "forward"}], DTYPES, most=1),
)
def test_beside_tensor_parallelism_and_in_replicas(make: str, mesh: dict[str, Any], dtype: torch.dtype) -> None:
    after = partial(alone, make, dtype)
    for found in run(4, compare_with_plain, make, STEPS, dtype, after=after, **LIKE_USERS, **mesh):
        assert found == []


@pytest.mark.full
def test_one_rank_alone() -> None:
    assert run(1, compare_with_plain, "muon and adamw", 3, clip=0.5, bucket_bytes=BUCKETS) == [[]]


@pytest.mark.full
def test_the_norm_has_the_bits_of_torch_s_where_no_parameter_is_cut() -> None:
    for found in run(2, compare_with_ddp, "muon and adamw", STEPS, vocabulary=200, **LIKE_USERS):
        assert found == []
