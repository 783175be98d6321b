"""A planner that finds the least makespan by integer programming; the other planners are measured by it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar

from canzona_compile.errors import CanzonaError
from canzona_compile.ownership.jobs import NOTHING, GridPosition, Job, LoadByRank, loads, lower_bound, makespan
from canzona_compile.ownership.lpt import Joint
from canzona_compile.ownership.milp import TOLERANCE, GaveUp, Patterns

SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class OptimalityBound:
    """How far a plan may be from the optimum.

    Attributes:
        optimum_or_best: the makespan of the plan, in the unit of costs.
        lower: a lower bound of the makespan of every plan, in the same unit.
        gap: by how much the plan may be worse than the best one; 0.01 is one percent.
        proven: whether the plan is proven optimal, to one part in a million.
    """

    optimum_or_best: float
    lower: float
    gap: float
    proven: bool


@dataclass(frozen=True, slots=True)
class Exact:
    """Finds the best plan that it can within `seconds`. The plan is never worse than that of `Joint`.

    If the time runs out, the plan depends on the speed of the machine. So one rank has to send its plan to the others,
    unless `solve` says on every rank that the plan is proven.

    Guarantee: the factor of `Joint`, or 1 if `solve` says that the plan is proven.

    Attributes:
        seconds: the time limit of the solver. The work before and after it is short.
    """

    seconds: float = SECONDS

    name: ClassVar[str] = "exact"

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise CanzonaError(f"seconds={self.seconds} is not positive", hint="pass a positive number")

    def __call__(self, jobs: Sequence[Job], rows: int, columns: int, load: LoadByRank) -> list[GridPosition]:
        return solve(jobs, rows, columns, load, seconds=self.seconds)[0]

    def bound(self, jobs: Sequence[Job], rows: int, columns: int, load: LoadByRank = NOTHING) -> float:
        """The factor of `Joint`, which holds for unproven plans as well; see `Planner.bound`."""
        return Joint().bound(jobs, rows, columns, load)


def solve(
    jobs: Sequence[Job], rows: int, columns: int, load: LoadByRank = NOTHING, *, seconds: float = SECONDS
) -> tuple[list[GridPosition], OptimalityBound]:
    """Find the best plan within a time limit.

    The search starts from the plan of `Joint`. If the makespan of that plan is above `lower_bound`, the candidates are
    all loads between the two that a place can have. The search tries the largest candidate first, because often none
    is possible, and then bisects. If the jobs are of too many kinds for that, the plan stays.

    Args:
        jobs: the jobs.
        rows: the number of rows.
        columns: the number of columns.
        load: the cost that ranks have already.
        seconds: the time limit of the solver.

    Returns:
        The owner (r, s) of each job, in the order of `jobs`, and how far the plan may be from the optimum.
    """
    return Search(jobs, rows, columns, load, time.monotonic() + seconds).run()


class Search:
    """The state of a search: the best plan so far, its makespan, and a lower bound of all makespans."""

    def __init__(self, jobs: Sequence[Job], rows: int, columns: int, load: LoadByRank, deadline: float) -> None:
        self.jobs, self.rows, self.columns, self.load, self.deadline = jobs, rows, columns, load, deadline
        self.best = Joint()(jobs, rows, columns, load)
        self.upper = self._makespan(self.best)
        self.lower = min(self.upper, lower_bound(jobs, rows, columns, load))

    def run(self) -> tuple[list[GridPosition], OptimalityBound]:
        """Look for better plans until the best one is proven; see `solve`."""
        if not self._proven():
            with suppress(GaveUp):  # the best plan and the bound so far stay valid
                self._bisect()
        gap = self.upper / self.lower - 1 if self.lower else 0.0
        return self.best, OptimalityBound(self.upper, self.lower, gap, self._proven())

    def _proven(self) -> bool:
        return self.upper <= self.lower * (1 + TOLERANCE)

    def _makespan(self, owners: list[GridPosition]) -> float:
        return makespan(loads(self.jobs, owners, self.rows, self.columns, self.load))

    def _bisect(self) -> None:
        patterns = Patterns(self.jobs, self.rows, self.columns, self.load, self.upper, self.deadline)
        candidates = patterns.makespans(self.lower, self.upper)
        middle = len(candidates) - 1
        while candidates:
            found = patterns.within(candidates[middle])
            if found is None:
                self.lower = candidates[middle]
                candidates = candidates[middle + 1 :]
            else:
                self._take(found)
                candidates = [c for c in candidates[:middle] if c < self.upper * (1 - TOLERANCE)]
            middle = len(candidates) // 2
        self.lower = self.upper

    def _take(self, found: Mapping[int, GridPosition]) -> None:
        owners = [found.get(job.index, place) for job, place in zip(self.jobs, self.best, strict=True)]
        if (made := self._makespan(owners)) < self.upper:
            self.best, self.upper = owners, made
