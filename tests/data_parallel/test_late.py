"""ZeRO-1: a late rank is waited for, and what one rank does otherwise is known to all ranks that would wait."""

from __future__ import annotations

from functools import partial

import pytest

from tests.data_parallel.late import (
    begins_anew,
    late_for_a_step,
    one_column_differs,
    raises_alike,
    reads_alone_before_a_flush,
)
from tests.data_parallel.mistakes import step_alone
from tests.harness.ranks import run

pytestmark = pytest.mark.ranks
AFTER = partial(step_alone)


def test_a_rank_that_is_late_for_a_step() -> None:
    """No rank begins to gather because it has waited: the late one goes on to another collective."""
    assert run(2, late_for_a_step, fresh=True, after=AFTER) == [[], []]


def test_one_rank_reads_parameters_before_all_optimizers_have_stepped() -> None:
    said, nothing = run(2, reads_alone_before_a_flush, fresh=True, after=AFTER)
    assert "rank 1 did not make this call" in said
    assert nothing == ""


def test_ranks_that_all_raise_the_same_go_on() -> None:
    """None of them hears what another one raised at the same place, however late that one is."""
    for said in run(2, raises_alike, fresh=True, after=AFTER):
        assert len(said) == 10
        assert all("its norm would differ" in one for one in said), said


def test_nothing_is_bound_on_ranks_whose_collectives_never_complete() -> None:
    for said, later in run(2, begins_anew, fresh=True, after=AFTER):
        assert said
        assert "interrupted a backward pass" in later


def test_ranks_of_tensor_parallelism_hear_what_differs_in_another_column() -> None:
    for first, second, third in run(4, one_column_differs, fresh=True):
        assert (first, third) == ("", "")
        assert "different arguments" in second
