"""Find the least possible makespan by integer programming, as the measure of other planners."""

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
        optimum_or_best: the makespan of the plan that this describes, in the unit of costs.
        lower: a lower bound of the makespan of every plan.
        gap: by how much the plan may be worse than the best one; 0.01 is one percent.
        proven: whether the plan is proven optimal, to one part in a million.
    """

    optimum_or_best: float
    lower: float
    gap: float
    proven: bool


@dataclass(frozen=True, slots=True)
class Exact:
    """Finds the best plan that it can in `seconds`. The plan is never worse than that of `Joint`.

    Beware: which plan it finds in limited time depends on the machine. If ranks plan by themselves and must agree, one
    of them has to send its plan to the others, unless `solve` says that the plan is proven: then all had enough time.

    Guarantee: that of `Joint`, or a factor of 1 if `solve` says that the plan is proven.

    Attributes:
        seconds: the time limit of the solver. The work before and after it is short.
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
    """The best plan that can be found, and how far from the optimum it may be.

    The search starts from the plan of `Joint`. If that does not reach `lower_bound`, the candidates are all loads in
    between that a place can have. The search first tries the largest one, because often none is possible, and then
    bisects. If the jobs are of too many kinds for that, a single program looks for the least makespan.
    """
    return Search(jobs, rows, columns, load, time.monotonic() + seconds).run()


class Search:
    """The state of the search: the best plan so far, and the largest makespan that is known to be too small."""

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
