"""What `make test` leaves to `make test-all`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def also(values: Iterable[Any]) -> list[Any]:
    """Parameters of a test that only `make test-all` runs."""
    return [full(value) for value in values]


def full(*values: Any) -> Any:
    """The same for a test of several parameters: one set of them."""
    return pytest.param(*values, marks=pytest.mark.full)


def crossed(*axes: Sequence[Any], fast: int = 1) -> list[Any]:
    """The product of several lists of values, for `parametrize` with several names.

    `make test` runs every value of every list at least `fast` times: combinations along diagonals. The other
    combinations are for `make test-all`.
    """
    longest = max(map(len, axes))
    kept = {
        tuple((place + shift * number) % len(axis) for number, axis in enumerate(axes))
        for place in range(longest)
        for shift in range(fast)
    }
    found = []
    for places in itertools.product(*(range(len(axis)) for axis in axes)):
        values = [axis[i] for axis, i in zip(axes, places, strict=True)]
        found.append(pytest.param(*values) if places in kept else full(*values))
    return found
