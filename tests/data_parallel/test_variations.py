"""Backward passes that are not one gradient per parameter in the order of registration."""

from __future__ import annotations

import pytest

from tests.data_parallel.variations import (
    VARIATIONS,
    adapted,
    averaged,
    loaded_in_mid_forward,
    scaled,
    train,
    unwrapped,
)
from tests.harness.marks import only
from tests.harness.ranks import run


@pytest.mark.parametrize(
    ("variation", "gather"),
    only([("tied", "forward"), ("read early", "forward")], list(VARIATIONS), ["step", "forward"]),
)
def test_unusual_backward_passes(variation: str, gather: str) -> None:
    assert run(2, train, variation, gather) == [[], []]


def test_an_attribute_of_a_parameter_that_comes_and_goes() -> None:
    assert run(2, scaled) == [[], []]


def test_backward_ends_where_all_gradients_arrive_in_checkpoints() -> None:
    for text in run(2, adapted):
        assert "its norm would differ" in text


def test_a_load_in_mid_forward_is_not_overwritten() -> None:
    assert run(2, loaded_in_mid_forward) == [[], []]


@pytest.mark.full
def test_an_unwrapped_model_is_ddp_s_again() -> None:
    assert run(2, unwrapped) == [[], []]


@pytest.mark.full
@pytest.mark.parametrize("gather", ["step", "forward"])
def test_a_moving_average(gather: str) -> None:
    assert run(2, averaged, gather) == [[], []]
