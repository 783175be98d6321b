"""Several models under zero1 on the same ranks: their collectives never meet one another's."""

from __future__ import annotations

import re

import pytest

from tests.data_parallel.twins import another_order, layer_left_out
from tests.harness.marks import crossed
from tests.harness.ranks import run


@pytest.mark.parametrize(("own_groups", "gather"), crossed([False, True], ["step", "forward"], most=3))
def test_a_layer_that_one_rank_leaves_out(own_groups: bool, gather: str) -> None:
    """Its model's buckets start later on that rank than the other model's; results are those of plain optimizers."""
    assert run(2, layer_left_out, own_groups, gather) == [[], []]


@pytest.mark.parametrize("own_groups", [False, True])
def test_models_that_are_stepped_in_another_order(own_groups: bool) -> None:
    for said, wrong in run(2, another_order, own_groups):
        assert re.search(r"made different calls.*rank 0: step\(\) of optimizer 0 .* of model (\d+); rank 1: .*", said)
        assert wrong == []
