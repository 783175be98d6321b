"""Fused weights under zero1: the bits of plain optimizers that have q, k, v, gate and up as parameters."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch.distributed as dist

from tests.data_parallel.fused import BUCKETS, SPLITS, FusedModel, alone, inputs, named, train
from tests.harness.marks import full
from tests.harness.model_pairs import update, zero1
from tests.harness.ranks import collectives, run


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


def started() -> list[int]:
    """The buckets, their shards that are not empty, and what backward and step of a steady iteration start."""
    model = FusedModel()
    optimizers = zero1(model, named("muon", model), split=SPLITS["uneven"], bucket_bytes=BUCKETS)
    for step in range(3):
        loss = model(inputs(step, dist.get_rank()))
        counts = [collectives()]
        loss.backward()
        counts.append(collectives())
        update(optimizers)
        counts.append(collectives())
    buckets = optimizers[0].canzona.zero1.buckets
    shards = sum(length > 0 for bucket in buckets for length in bucket.shard_lengths)
    return [len(buckets), shards, counts[1] - counts[0], counts[2] - counts[1]]


@pytest.mark.full
def test_a_step_has_no_collective_of_its_own() -> None:
    for buckets, shards, backward, step in run(2, started, after=partial(alone, "muon", "uneven")):
        assert buckets > 4
        assert backward == buckets + 2  # an announcement, and an exchange that tells who has gradients
        # On gloo a shard is a broadcast, and one bucket has a shard that two optimizers share. Each announces its step.
        assert step == shards + 1 + 2
