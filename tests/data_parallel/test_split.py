"""Fused weights under zero1: the bits of plain optimizers that have q, k, v, gate and up as parameters."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from tests.data_parallel.fused import BUCKETS, alone, train
from tests.harness.marks import full
from tests.harness.ranks import run


@pytest.mark.parametrize(
    ("make", "split", "options"),
    [
        ("muon", "interleaved", {"gather": "forward", "restored": True}),
        full("muon", "block", {"bucket_bytes": 1 << 20}),
        full("muon", "heads", {}),
        full("muon", "uneven", {}),
        full("soap", "block", {"restored": True}),
        full("soap", "interleaved", {"gather": "forward"}),
        full("interpreted", "heads", {"restored": True}),
        full("adamw", "block", {}),
    ],
    ids=str,
)
def test_two_ranks_train_as_under_ddp(make: str, split: str, options: dict[str, Any]) -> None:
    after = partial(alone, make, split)
    assert run(2, train, make, split, after=after, **{"bucket_bytes": BUCKETS, **options}) == [[], []]


@pytest.mark.parametrize(
    ("world", "make", "split", "options"),
    [
        full(3, "muon", "interleaved", {}),
        full(4, "soap", "heads", {"restored": True}),
        full(4, "muon", "interleaved", {"replicas": 2}),
        full(4, "muon", "interleaved", {"tp": "dtensor", "restored": True}),
        full(4, "soap", "block", {"tp": "dtensor", "gather": "forward", "restored": True}),
        full(4, "muon", "uneven", {"tp": "dtensor"}),
        full(4, "soap", "uneven", {"tp": "dtensor", "restored": True, "bucket_bytes": 100}),
        full(4, "interpreted", "block", {"tp": "dtensor", "restored": True}),
        full(4, "muon", "interleaved", {"tp": "by hand", "restored": True}),
        full(4, "soap", "interleaved", {"tp": "by hand", "restored": True}),
        full(4, "interpreted", "interleaved", {"tp": "by hand", "restored": True}),
        full(4, "adamw", "interleaved", {"tp": "by hand"}),
    ],
    ids=str,
)
def test_reduced_gradients_give_the_plain_step(world: int, make: str, split: str, options: dict[str, Any]) -> None:
    """Also where tensor parallelism cuts pieces, so that a rank may hold no row of one, and where it is by hand."""
    after = partial(alone, make, split)
    for found in run(world, train, make, split, after=after, **{"bucket_bytes": BUCKETS, **options}):
        assert found == []
