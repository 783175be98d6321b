"""Fused weights under zero1: the bits of plain optimizers that have q, k, v, gate and up as parameters."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from tests.data_parallel.fused import alone, train
from tests.harness.marks import full
from tests.harness.ranks import run

BUCKETS = 4000  # bytes: pieces of one weight lie in several buckets


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
