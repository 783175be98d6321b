"""The least possible makespan, by integer programming: what other planners are measured against."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar

from canzona_compile.errors import CanzonaError
from canzona_compile.ownership.jobs import NOTHING, GridPosition, Job, LoadByRank, loads, lower_bound, makespan
from canzona_compile.ownership.lpt import Joint
from canzona_compile.ownership.milp import TOLERANCE, Allotment, GaveUp, Kinds, Patterns, by_counts

SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class OptimalityBound:
    """How good a plan is.

    Attributes:
        optimum_or_best: the makespan of the plan that comes with it, in the unit of costs.
        lower: no plan has less.
        gap: by how much the plan may be worse than the best one: 0.01 is one percent.
        proven: is the plan optimal, to one part in a million?
    """

    optimum_or_best: float
    lower: float
    gap: float
    proven: bool


@dataclass(frozen=True, slots=True)
class Exact:
    """The best plan that is found in `seconds`; never worse than that of `Joint`.

    Beware: which plan is found in limited time depends on the machine. Where ranks plan alone and must agree, one of
    them has to tell the others, unless `solve` says that the plan is proven: then all of them had enough time.

    Guarantee: that of `Joint`. If `solve` calls the plan proven, 1.

    Attributes:
        seconds: for the solver; what comes before and after it is short.
    """

    seconds: float = SECONDS

    name: ClassVar[str] = "exact"

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise CanzonaError(f"seconds={self.seconds} leaves no time to solve", hint="pass a positive number")

    def __call__(self, jobs: Sequence[Job], rows: int, columns: int, load: LoadByRank) -> list[GridPosition]:
        return solve(jobs, rows, columns, load, seconds=self.seconds)[0]

    def bound(self, jobs: Sequence[Job], rows: int, columns: int, load: LoadByRank = NOTHING) -> float:
        return Joint().bound(jobs, rows, columns, load)


def solve(
    jobs: Sequence[Job], rows: int, columns: int, load: LoadByRank = NOTHING, *, seconds: float = SECONDS
) -> tuple[list[GridPosition], OptimalityBound]:
    """The best plan found, and how far from the optimum it can be.

    Starts from `Joint`. Unless that reaches `lower_bound`, all sums that a place can have in between are tried as
    makespans: first the largest, since often none of them can be had, then by bisection. Where jobs are of too many
    kinds for that, a single program looks for the least makespan.
    """
    return Search(jobs, rows, columns, load, time.monotonic() + seconds).run()


class Search:
    """Between the best plan so far and the largest makespan that is known to be too small."""

    def __init__(self, jobs: Sequence[Job], rows: int, columns: int, load: LoadByRank, deadline: float) -> None:
        self.jobs, self.rows, self.columns, self.load, self.deadline = jobs, rows, columns, load, deadline
        self.best = Joint()(jobs, rows, columns, load)
        self.upper = self._makespan(self.best)
        self.lower = min(self.upper, lower_bound(jobs, rows, columns, load))

    def run(self) -> tuple[list[GridPosition], OptimalityBound]:
        for attempt in (self._bisect, self._count):
            if not self._proven():
                with suppress(GaveUp):  # what is known by then is the answer
                    attempt(Kinds.of(self.jobs, self.rows, self.columns, self.load))
        gap = self.upper / self.lower - 1 if self.lower else 0.0
        return self.best, OptimalityBound(self.upper, self.lower, gap, self._proven())

    def _proven(self) -> bool:
        return self.upper <= self.lower * (1 + TOLERANCE)

    def _makespan(self, owners: list[GridPosition]) -> float:
        return makespan(loads(self.jobs, owners, self.rows, self.columns, self.load))

    def _bisect(self, kinds: Kinds) -> None:
        patterns = Patterns(kinds, self.upper, self.deadline)
        candidates = patterns.makespans(self.lower, self.upper)
        middle = len(candidates) - 1
        while candidates:
            found = patterns.within(candidates[middle])
            if found is None:
                self.lower = candidates[middle]
                candidates = candidates[middle + 1 :]
            else:
                self._take(kinds, found)
                candidates = [c for c in candidates[:middle] if c < self.upper * (1 - TOLERANCE)]
            middle = len(candidates) // 2
        self.lower = self.upper

    def _count(self, kinds: Kinds) -> None:
        found, lower = by_counts(kinds, self.lower, self.upper, self.deadline)
        if found is not None:
            self._take(kinds, found)
        self.lower = min(self.upper, max(self.lower, lower))

    def _take(self, kinds: Kinds, found: Allotment) -> None:
        chosen = kinds.owners(found)
        owners = [chosen.get(job.index, place) for job, place in zip(self.jobs, self.best, strict=True)]
        if (made := self._makespan(owners)) < self.upper:
            self.best, self.upper = owners, made
