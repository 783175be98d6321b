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


def first(values: Iterable[Any], count: int = 1) -> list[Any]:
    """Parameters of a test of which `make test` runs the first ones."""
    found = list(values)
    return [*found[:count], *also(found[count:])]


def only(kept: Sequence[Any], *axes: Sequence[Any]) -> list[Any]:
    """The product of several lists of values, of which `make test` runs the kept combinations."""
    found = list(itertools.product(*axes))
    assert all(values in found for values in kept), "a combination that there is not"
    return [pytest.param(*values) if values in kept else full(*values) for values in found]


def crossed(*axes: Sequence[Any], fast: int = 1, most: int | None = None) -> list[Any]:
    """The product of several lists of values, for `parametrize` with several names.

    `make test` runs every value of every list at least `fast` times: combinations along diagonals, or the first `most`
    of them. The other combinations are for `make test-all`.
    """
    longest = max(map(len, axes))
    diagonals = [
        tuple((place + shift * number) % len(axis) for number, axis in enumerate(axes))
        for place in range(longest)
        for shift in range(fast)
    ]
    kept = set(list(dict.fromkeys(diagonals))[:most])
    found = []
    for places in itertools.product(*(range(len(axis)) for axis in axes)):
        values = [axis[i] for axis, i in zip(axes, places, strict=True)]
        found.append(pytest.param(*values) if places in kept else full(*values))
    return found
