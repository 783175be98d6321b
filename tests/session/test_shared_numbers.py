"""What ranks compare before a step is equal where processes hold equal values."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from canzona_compile.session.variant_selection import described


class Options:
    """An object that is printed with its address."""


@pytest.mark.parametrize(
    ("one", "two"), [(Options(), Options()), ([lambda: 1], [lambda: 1]), ({0, 8}, {8, 0})], ids=["o", "f", "s"]
)
def test_equal_values_are_described_alike(one: Any, two: Any) -> None:
    assert described({"lr": 0.1, "own": one}) == described({"own": two, "lr": 0.1})


@pytest.mark.parametrize("two", [0.2, torch.tensor(0.2), None, "0.1", [0.1]])
def test_other_values_are_described_otherwise(two: Any) -> None:
    assert described({"lr": 0.1}) != described({"lr": two})


def test_a_tensor_is_described_by_its_values() -> None:
    assert described({"lr": torch.tensor(0.5)}) == "lr=0.5"
