"""How a kind's code goes on: which variant each step takes, and from where that repeats itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Counters = Mapping[Any, Any]  # leaves of the state by name, others by `external_counters.Counter`


@dataclass(frozen=True, slots=True)
class Course:
    """The variants of a kind, step by step.

    Attributes:
        counters: those that grow by one with every step, and their values at the second step of a parameter
            (which is number 0 here: the first one makes the state).
        start: the step from which on variants repeat themselves.
        period: names of their templates from there on.
    """

    counters: Mapping[Any, int]
    start: int
    period: tuple[str, ...]

    @property
    def periodic(self) -> bool:
        """Is there work that only some steps do, again and again?"""
        return len(set(self.period)) > 1

    def number(self, counters: Counters) -> int:
        """Which step it is, by the counters before it."""
        return next(int(counters[name]) - first for name, first in self.counters.items() if name in counters)

    def ahead(self, counters: Counters, steps: int) -> dict[Any, Any]:
        """The counters some steps later."""
        return {name: value + steps if name in self.counters else value for name, value in counters.items()}


def course_of(path: Sequence[str], counters: Sequence[Counters]) -> Course | None:
    """The course that explains a path best; None if nothing counts.

    Args:
        path: the templates that steps 0, 1, ... took.
        counters: before each of these steps.
    """
    counting = {
        name: value
        for name, value in (counters[0].items() if path else ())
        if isinstance(value, int) and all(c.get(name) == value + i for i, c in enumerate(counters))
    }
    if not counting:
        return None
    start, length = repetition(path)
    return Course(counting, start, tuple(path[start : start + length]))


def repetition(path: Sequence[str]) -> tuple[int, int]:
    """Start and length of what repeats itself: the shortest beginning and period, together, that give the path."""
    found = []
    for length in range(1, len(path) + 1):
        unlike = [i for i in range(len(path) - length) if path[i] != path[i + length]]
        start = unlike[-1] + 1 if unlike else 0
        found.append((start + length, start, length))
    _, start, length = min(found)
    return start, length
