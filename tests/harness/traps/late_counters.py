"""Counters on the optimizer that are not there, or hold nothing, before the first step."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tests.harness.traps.counters import Counting
from tests.harness.traps.trap import Trap

FAMILY = "late counters"


class InCounter(Counting):
    """A Counter on the optimizer."""

    def begin(self) -> None:
        self.counts: Counter[str] = Counter()

    def tick(self) -> Any:
        self.counts["steps"] += 1
        return self.counts["steps"]


class InLateAttribute(Counting):
    """An attribute that the first step makes."""

    def tick(self) -> Any:
        self.late = getattr(self, "late", 0) + 1
        return self.late


class InLateDict(Counting):
    """An entry of a dict that the first step makes."""

    def begin(self) -> None:
        self.stats: dict[str, dict[str, int]] = {}

    def tick(self) -> Any:
        own = self.stats.setdefault("all", {"steps": 0})
        own["steps"] += 1
        return own["steps"]


TRAPS = (
    Trap("count-in-counter", FAMILY, InCounter, "either", ("counts",), seen=lambda o: o.counts["steps"]),
    Trap(
        "count-in-attribute-made-late",
        FAMILY,
        InLateAttribute,
        "either",
        ("late",),
        seen=lambda o: getattr(o, "late", None),
    ),
    Trap("count-in-dict-made-late", FAMILY, InLateDict, "either", ("stats",), seen=lambda o: str(o.stats)),
)
