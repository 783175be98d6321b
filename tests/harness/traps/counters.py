"""Counters outside of states: in objects, classes, globals, closures, default arguments, NumPy, modules."""

from __future__ import annotations

from typing import Any

from tests.harness.traps.grammar import EITHER, EQUAL, Family, pieces_of

counters, late = Family("counters", EITHER), Family("late counters", EITHER)


def counts(name: str, says: str, begin: str, tick: str, count: str, seen: str = "None", **others: Any) -> None:
    """Counts one step somewhere, and divides by the count.

    Args:
        begin: how the counter begins, in the constructor.
        tick: how a step counts.
        count: the count.
        seen: what the user sees of it.
    """
    step = f"{tick}\ncount = {count}"
    counters(name, says=says, begin=begin, step=step, times="1 / count", seen=seen, **others)


CLOCK = ("clock", "self.clock = Clock()", "self.clock.ticks += 1", "self.clock.ticks")
counts("count-in-object", *CLOCK, "optimizer.clock.ticks")
counts("count-in-class", "ticks", "Made.ticks = 0", "Made.ticks += 1", "Made.ticks", "Made.ticks", body="ticks = 0")
counts("count-in-global", "ticks", "ticks = 0", "ticks += 1", "ticks", "ticks", outside="ticks = 0")
counters("count-in-closure")("""
    begin:
        count = 0
        def advance():
            nonlocal count
            count += 1
            return count
        self.advance = advance
    step: count = self.advance()
    times: 1 / count
""")
counts("count-in-list", "cell", "self.cell = [0]", "self.cell[0] += 1", "self.cell[0]", "optimizer.cell")
counts("count-in-tensor", "count", "self.count = torch.zeros(())", "", "self.count.add_(1)", "optimizer.count")
counts(
    "count-in-module", "clock", "self.clock = ClockModule()", "", "self.clock.ticks.add_(1)", "optimizer.clock.ticks"
)
counts("count-in-iterator", "numbers", "self.numbers = itertools.count(1)", "", "next(self.numbers)")
counts("count-in-float", "rate", "self.rate = 1.0", "self.rate *= 1.5", "self.rate", "optimizer.rate")

# -- a count that decides which algorithm is meant, and counts of other things ----------------------

DECIDES = pieces_of("""
    body: steps = 0
    step: self.steps += 1
    update: grad if self.steps < 4 else cube(grad)
    times: 1.0
""")
counters("count-decides", EQUAL, **DECIDES, steps=6, seen="optimizer.steps")
for name, key in (
    ("count-per-id", "id(param)"),
    ("count-per-parameter", "param"),
):
    counters(
        name,
        EITHER,
        says="counts",
        begin="self.counts = {}",
        param=f"key = {key}\nself.counts[key] = self.counts.get(key, 0) + 1",
        scale="1 / self.counts[key]",
    )
counters("count-of-calls", says="calls", body="calls = 0", param="self.calls += 1", scale="1 / self.calls")

# -- counters that are not there, or hold nothing, before the first step ----------------------------

late("count-in-counter", says="counts")("""
    begin: self.counts = Counter()
    step: self.counts["steps"] += 1
    times: 1 / self.counts["steps"]
    seen: optimizer.counts["steps"]
""")
late("count-in-attribute-made-late", says="late")("""
    step: self.late = getattr(self, "late", 0) + 1
    times: 1 / self.late
    seen: getattr(optimizer, "late", None)
""")
late("count-in-dict-made-late", says="stats")("""
    begin: self.stats = {}
    step:
        own = self.stats.setdefault("all", {"steps": 0})
        own["steps"] += 1
    times: 1 / own["steps"]
    seen: str(optimizer.stats)
""")
