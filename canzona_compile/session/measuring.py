"""Measure some steps of a session, and bring the figures of all ranks together after the last one.

Ranks have to measure the same steps. While they do, they compare that before every step, with the numbers that the
step reads.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from canzona_compile.errors import CanzonaError
from canzona_compile.ir.layout import Ranks
from canzona_compile.ir.step import Step
from canzona_compile.runtime.meeting import Purpose, meet_all
from canzona_compile.runtime.step_clock import OTHER, MeasuredStep, NotedStep, StepClock
from canzona_compile.session.planning import PlannedSession

LAST_STEP = Purpose(
    "the last step of measure()",
    "because each rank has measured only itself",
    "look at the output of the missing rank: it died, raised an error, or takes fewer steps. This step has updated all "
    "parameters. To measure again, call measure() on all ranks before the same step",
)


@dataclass(frozen=True, slots=True)
class RankTimes:
    """What one rank measured, by step.

    Attributes:
        exposed: seconds of each step in which the rank waited for communication.
        acts: seconds of each act of each step.
    """

    seconds: tuple[float, ...]
    exposed: tuple[float, ...]
    acts: tuple[Mapping[str, float], ...]

    @classmethod
    def of(cls, steps: list[MeasuredStep]) -> RankTimes:
        """Those of the steps of this rank."""
        return cls(
            tuple(s.seconds for s in steps),
            tuple(s.exposed for s in steps),
            tuple(s.by_act() for s in steps),
        )

    def then(self, other: RankTimes) -> RankTimes:
        """These steps, each followed by one of another optimizer."""
        return RankTimes(
            tuple(a + b for a, b in zip(self.seconds, other.seconds, strict=True)),
            tuple(a + b for a, b in zip(self.exposed, other.exposed, strict=True)),
            tuple(
                {n: a.get(n, 0.0) + b.get(n, 0.0) for n in {**a, **b}}
                for a, b in zip(self.acts, other.acts, strict=True)
            ),
        )

    def to_json(self) -> str:
        return json.dumps([self.seconds, self.exposed, [dict(own) for own in self.acts]])

    @classmethod
    def from_json(cls, text: str) -> RankTimes:
        seconds, exposed, acts = json.loads(text)
        return cls(tuple(seconds), tuple(exposed), tuple(acts))


@dataclass(frozen=True, eq=False, slots=True)
class Measurement:
    """Measured steps.

    Attributes:
        ranks: what each rank measured, by global rank: the ranks that share tasks with this one.
        steps: the scheduled steps that ran, in order; None for one that made a plan and ran no program of it.
    """

    device: str
    ranks: Mapping[int, RankTimes]
    steps: tuple[Step | None, ...]
    own: tuple[MeasuredStep, ...]


def both_measured(one: Measurement | None, two: Measurement | None) -> Measurement | None:
    """The measurement of two optimizers that step one after the other.

    Phases are those of both. The programs are those of the first one that has matrices.
    """
    if one is None or two is None or len(one.own) != len(two.own) or one.device != two.device:
        return one or two
    ranks = {
        rank: one.ranks[rank].then(two.ranks[rank]) if rank in one.ranks and rank in two.ranks else own
        for rank, own in (*two.ranks.items(), *one.ranks.items())
    }
    busy = one if any(step is not None and step.tasks for step in one.steps) else two
    return Measurement(one.device, ranks, busy.steps, busy.own)


@dataclass(slots=True)
class Measuring:
    """Measures the next steps of a session.

    Attributes:
        wanted: how many steps to measure; 0 while nothing is measured.
        clock: notes the acts of these steps; None while nothing is measured.
        found: the last measurement; None if there is none of this plan.
    """

    wanted: int = 0
    clock: StepClock | None = None
    found: Measurement | None = None
    _taken: list[NotedStep] = field(default_factory=list)
    _steps: list[Step | None] = field(default_factory=list)

    def begin(self, steps: int, device: torch.device) -> None:
        """Measure the next steps, and forget what was measured before."""
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise CanzonaError(f"steps is {steps!r}, not a positive integer", at="measure()", hint="5 steps are enough")
        self.end()
        self.wanted, self.found = steps, None
        self.clock = StepClock(device)

    def end(self) -> None:
        """Stop to measure."""
        if self.clock is not None:
            self.clock.stopped = True
        self.wanted, self.clock = 0, None
        self._taken, self._steps = [], []

    @property
    def text(self) -> str:
        """What ranks compare before a step; empty while nothing is measured."""
        return f"\nmeasure() has measured {len(self._taken)} of {self.wanted} steps" if self.wanted else ""

    def marked(self, numbers: dict[Ranks, str]) -> dict[Ranks, str]:
        """Add what is measured to the numbers that ranks compare before a step."""
        return {ranks: f"{text}{self.text}" for ranks, text in numbers.items()} if self.wanted else numbers

    def step(self, session: PlannedSession, take_step: Callable[[], bool]) -> bool:
        """Take a step of a session and measure it. After the last one ranks exchange figures, which is a collective.

        The first step does not count, because it makes the plan. A later one that plans again does: under ZeRO-1 ranks
        plan again on steps of their own, and have to measure equally many. An error ends measuring.
        """
        clock, driver = self.clock, session.driver
        assert clock is not None
        if driver is not None:
            driver.clock = clock
            if driver.last is not None:
                driver.last.executor.timed()  # made before the step, because its time does not belong to the step
        try:
            with clock.during(OTHER):
                new = take_step()
            taken = clock.take()
            ran = None if session.driver is None else session.driver.last
            if driver is not None:
                self._taken.append(taken)
                self._steps.append(None if ran is None else ran.step)
            if len(self._taken) == self.wanted:
                self._exchange(session)
                new = True
        except BaseException:
            self.end()
            raise
        finally:
            if session.driver is not None:
                session.driver.clock = None
        return new

    def _exchange(self, session: PlannedSession) -> None:
        """Bring the figures of all ranks together."""
        assert self.clock is not None
        read = self.clock.read(self._taken)
        own, sets = RankTimes.of(read), session.sharing()
        found = {session.rank: own}
        with session.telling():
            meet_all(dict.fromkeys(sets, "the last measured step"), session.meeting_of, LAST_STEP)
            for ranks in sorted(sets):
                texts = sets[ranks](own.to_json())
                found |= {rank: RankTimes.from_json(text) for rank, text in zip(ranks, texts, strict=True)}
        made = Measurement(self.clock.device.type, dict(sorted(found.items())), tuple(self._steps), tuple(read))
        self.end()
        self.found = made
