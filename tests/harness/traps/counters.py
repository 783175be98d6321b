"""Counters outside of states: in objects, classes, globals, closures, default arguments, NumPy, modules."""

from __future__ import annotations

from typing import Any

from tests.harness.traps.grammar import EITHER, ELEMENTWISE, EQUAL, ON_HOST, Family, pieces_of

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
counts("count-in-object-elementwise", *CLOCK, **ELEMENTWISE)
counts("count-in-object-on-host", *CLOCK, **ON_HOST)
counts("count-in-class", "ticks", "Made.ticks = 0", "Made.ticks += 1", "Made.ticks", "Made.ticks", body="ticks = 0")
counts("count-in-global", "ticks", "ticks = 0", "ticks += 1", "ticks", "ticks", outside="ticks = 0")
counters("count-in-global-counter", says="TALLY")("""
    outside: TALLY = Counter()
    begin: TALLY.clear()
    step:
        TALLY["steps"] += 1
        count = TALLY["steps"]
    times: 1 / count
    seen: TALLY["steps"]
""")
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
counters("count-in-default-argument")("""
    begin: self.advance.__func__.__defaults__[0][0] = 0
    body:
        def advance(self, memory=[0]):
            memory[0] += 1
            return memory[0]
    step: count = self.advance()
    times: 1 / count
""")
counts("count-in-list", "cell", "self.cell = [0]", "self.cell[0] += 1", "self.cell[0]", "optimizer.cell")
counters("count-in-numpy", says="count")("""
    begin: self.count = np.int64(0)
    step: self.count += 1
    times: 1 / float(self.count)
    seen: float(optimizer.count)
""")
counters("count-in-numpy-array", says="counts")("""
    begin: self.counts = np.zeros(1)
    step: self.counts[0] += 1
    times: 1 / float(self.counts[0])
    seen: float(optimizer.counts[0])
""")
counts("count-in-tensor", "count", "self.count = torch.zeros(())", "", "self.count.add_(1)", "optimizer.count")
counts(
    "count-in-module", "clock", "self.clock = ClockModule()", "", "self.clock.ticks.add_(1)", "optimizer.clock.ticks"
)
counts("count-in-iterator", "numbers", "self.numbers = itertools.count(1)", "", "next(self.numbers)")
counters("count-in-generator")("""
    begin:
        def schedule():
            value = 1.0
            while True:
                yield value
                value *= 1.5
        self.schedule = schedule()
    step: count = next(self.schedule)
    times: 1 / count
""")
# The mean of the last learning rates counts.
counters("count-in-deque", says="recent")("""
    begin: self.recent = deque([1.0], maxlen=3)
    step: self.recent.append(self.recent[-1] * 1.5)
    times: 1 / (sum(self.recent) / len(self.recent))
    seen: list(optimizer.recent)
""")
counts("count-in-float", "rate", "self.rate = 1.0", "self.rate *= 1.5", "self.rate", "optimizer.rate")
counters("count-in-property", says="asked")("""
    body:
        asked = 0

        @property
        def count(self):
            self.asked += 1
            return self.asked
    step: count = self.count
    times: 1 / count
    seen: optimizer.asked
""")
IN_GROUP = 'self.param_groups[0]["clock"]'
counts("count-in-group-object", "clock", f"{IN_GROUP} = Clock()", f"{IN_GROUP}.ticks += 1", f"{IN_GROUP}.ticks")

# -- a count that decides which algorithm is meant, and counts of other things ----------------------

DECIDES = pieces_of("""
    body: steps = 0
    step: self.steps += 1
    update: grad if self.steps < 4 else cube(grad)
    times: 1.0
""")
counters("count-decides", EQUAL, **DECIDES, steps=6, seen="optimizer.steps")
counters("count-decides-and-starts-again", EQUAL, **DECIDES, steps=7, edit="optimizer.steps = 0")
for name, key in (
    ("count-per-id", "id(param)"),
    ("count-per-shape", "tuple(param.shape)"),  # which couples parameters of one shape
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
counters("count-by-hook", EQUAL)("""
    begin:
        self.steps = 1
        self.register_step_post_hook(lambda opt, args, kwargs: setattr(opt, "steps", opt.steps + 1))
    step: count = self.steps
    times: 1 / count
    seen: optimizer.steps
""")

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
