"""What zero1 communicates and holds in backward, step and forward."""

from __future__ import annotations

import pytest

from tests.data_parallel.phases import gated_run, keys_of_scaled_steps, measure, scaler_run
from tests.harness.marks import also, first
from tests.harness.ranks import run

FP32 = 4
OPTIMIZERS = 2


@pytest.mark.parametrize("gather", first(["step", "forward"]))
def test_a_step_has_no_collective_of_its_own(gather: str) -> None:
    owners = 2
    for found in run(owners, measure, gather):
        assert found.buckets > 2
        assert found.shared
        # The announcement on the host, a reduction per bucket, and one exchange of who has gradients.
        assert found.backward == 1 + found.buckets + 1
        # Each optimizer announces its step. Of a bucket with parameters of both, each gathers its own, so that they are
        # whole when its step returns. An owner that has none of them sends nothing.
        most = owners * (found.buckets + found.shared if gather == "step" else 0)
        assert most - found.shared <= found.step - OPTIMIZERS <= most
        assert found.forward == owners * (found.buckets if gather == "forward" else 0)
        assert 1 <= found.started - 1 < found.buckets  # the last gradient was not there yet
        assert found.late == (gather == "forward")
        assert found.reduced == FP32 * (found.elements + found.padding) // 2
        assert FP32 * found.elements // 2 <= found.gathered <= 1.03 * found.reduced  # each parameter once
        assert found.padding <= 0.03 * found.elements


@pytest.mark.full
def test_gradients_and_state_are_held_once() -> None:
    world = 3
    ranks = run(world, measure, "step")
    whole = FP32 * ranks[0].elements
    assert sum(found.gradients for found in ranks) == whole
    assert sum(found.state for found in ranks) == ranks[0].whole_state
    for found in ranks:
        assert found.state <= 1.25 * found.whole_state / world
        # Shards that have arrived, one bucket, what all ranks sent for this rank's shard of it, and the memory of a
        # second bucket, which gathers keep.
        assert 0 < found.most_reduced <= 1.03 * whole / world + 3 * found.largest_bucket
        assert found.most_unreduced <= 2 * found.largest_bucket


@pytest.mark.parametrize("bad", [*also([None, 0]), 1])
def test_an_infinity_on_one_rank_skips_the_step_on_all(bad: int | None) -> None:
    one, two = run(2, scaler_run, bad)
    assert one == two
    moved, scales, _ = one
    assert moved == [True, bad is None, True]
    assert scales[1] == (4.0 if bad is None else 2.0)


def test_parameters_that_no_rank_used_are_left_alone() -> None:
    """A parameter that some rank used is updated, with zeros from the others; one that none used is skipped."""
    gates = [[True, True], [False, True], [False, False], [True, False]]
    one, two = run(2, gated_run, gates)
    assert one == two
    assert one == [[True, any(own), False] for own in gates]


def test_the_store_does_not_grow_with_steps() -> None:
    """Also where gradients are scaled by hand, which ranks tell one another."""
    for first_step, *later in run(2, keys_of_scaled_steps, 4):
        assert later == [first_step] * 3
