"""Periods of variants: which graph a matrix takes on each step, if work is done periodically."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Counters = Mapping[Any, Any]  # leaves of the state by name, others by where they are


@dataclass(frozen=True, slots=True)
class VariantPeriod:
    """The variants of a kind, step by step.

    Attributes:
        counters: the counters that grow by one on every step, with their values at the second step of a parameter.
            That step has number 0 here, because the first step creates the state.
        start: the number of the step from which on the variants repeat themselves.
        period: the names of their templates, for one period that begins at `start`.
    """

    counters: Mapping[Any, int]
    start: int
    period: tuple[str, ...]

    @property
    def periodic(self) -> bool:
        """Whether some work is done periodically, on some steps only."""
        return len(set(self.period)) > 1

    def number(self, counters: Counters) -> int:
        """Return the number of a step, given the counters before it."""
        return next(int(counters[name]) - first for name, first in self.counters.items() if name in counters)

    def ahead(self, counters: Counters, steps: int) -> dict[Any, Any]:
        """Return the counters as they will be some steps later."""
        return {name: value + steps if name in self.counters else value for name, value in counters.items()}


def variant_period_of(path: Sequence[str], counters: Sequence[Counters]) -> VariantPeriod | None:
    """Find the shortest period that explains a path.

    Returns:
        The period; None if no counter grows by one on every step.
    """
    counting = {
        name: value
        for name, value in (counters[0].items() if path else ())
        if isinstance(value, int) and all(c.get(name) == value + i for i, c in enumerate(counters))
    }
    if not counting:
        return None
    start, length = repetition(path)
    return VariantPeriod(counting, start, tuple(path[start : start + length]))


def repetition(path: Sequence[str]) -> tuple[int, int]:
    """Find the start and the length of the period of a path, with the least sum of both."""
    found = []
    for length in range(1, len(path) + 1):
        unlike = [i for i in range(len(path) - length) if path[i] != path[i + length]]
        start = unlike[-1] + 1 if unlike else 0
        found.append((start + length, start, length))
    _, start, length = min(found)
    return start, length
