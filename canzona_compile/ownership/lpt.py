"""Planners that ignore the order of the buffer: they place the most costly job first, in two stages or in one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from canzona_compile.ownership.buffer import capped
from canzona_compile.ownership.greedy import largest_first, within_rows
from canzona_compile.ownership.jobs import (
    NOTHING,
    GridPosition,
    Job,
    LoadByRank,
    loads,
    lower_bound,
    makespan,
    places_of,
    row_loads,
)
from canzona_compile.ownership.local_search import SwapSearch


@dataclass(frozen=True, slots=True)
class TwoStageLpt:
    """Assigns every job to a row, then the jobs of each row to its columns.

    Both stages take the most costly job first and give it to the row, or column, with the least load at that time.

    Guarantee: if there is one row or one column, that of `LptSwap`. Otherwise the makespan is at most 2 - 1/W times the
    optimum over W = R x S places, loads included.

    Proof, with T the sum of all costs and loads:
        1. If the busiest place has no job, its load is at most the optimum. Otherwise let its last job cost j. Before
           that job it had the least load in its row. So it ends with at most 1/S of its row plus (1 - 1/S) * j.
        2. Let the last job of that row cost i. For the same reason the row ends with at most T/R + (1 - 1/R) * i.
        3. Let c be the highest cost of a job. Steps 1 and 2 together give at most T/W + (1 - 1/W) * c.
        4. The optimum is at least T/W and at least c.
    """

    name: ClassVar[str] = "lpt"

    def __call__(self, jobs: Sequence[Job], rows: int, columns: int, load: LoadByRank) -> list[GridPosition]:
        owned = largest_first(jobs, dict(enumerate(row_loads(rows, load))), "cost")
        return within_rows(jobs, owned, columns, "cost", load)

    def bound(self, jobs: Sequence[Job], rows: int, columns: int, load: LoadByRank = NOTHING) -> float:
        """The factor of the guarantee above; see `Planner.bound`."""
        if 1 in (rows, columns):
            return LptSwap().bound(jobs, rows, columns, load)
        return capped(2 - 1 / (rows * columns), rows, columns, load, blind=False)


@dataclass(frozen=True, slots=True)
class LptSwap:
    """Assigns the most costly job first to the place with the least load, and then improves the plan by swaps.

    If jobs are equal, the one of lower index comes first. If places are equal, the job goes to the lowest column and
    then to the lowest row. So equal jobs spread over the replicas, which then have equally much to exchange.

    `SwapSearch` relieves the busiest place. If `TwoStageLpt` has the better plan even so, the swaps start again from
    that plan. So the result is never worse than without the swaps, and never worse than `TwoStageLpt`.

    Guarantee: over W places, the makespan is at most 4/3 - 1/(3W) times the optimum if no rank has a load before
    (Graham 1969), and otherwise at most 3/2 - 1/(2W) times (Lee 1991).

    Proof of the second factor, before the swaps:
        1. If the busiest place has no job, its load is at most the optimum. Otherwise let j be the cost of its last
           job. Leave out all jobs that come after that one. The busiest place keeps its cost, and the optimum does not
           grow. Every job that is left costs at least j.
        2. Let T be the sum of all loads and of the costs that are left. Before its last job the place had the least
           load, at most (T - j)/W. So it ends with at most T/W + (1 - 1/W) * j. The optimum is at least T/W. If j is at
           most half the optimum, the factor follows.
        3. If j is more than half the optimum, an optimal plan has at most one job on each place. Then it is best to put
           the i-th most costly job on the place with the i-th smallest load.
        4. When the rule comes to the i-th most costly job, one of the i places with the smallest loads has no job yet.
           So the job ends up on a place with at most the i-th smallest load, and the makespan is the optimum at most.
    """

    name: ClassVar[str] = "lpt-swap"

    def __call__(self, jobs: Sequence[Job], rows: int, columns: int, load: LoadByRank) -> list[GridPosition]:
        # Keys are (column, row): among places with equal load, all rows of the lowest column come first.
        free = largest_first(jobs, {(s, r): load.get((r, s), 0.0) for r, s in places_of(rows, columns)}, "cost")
        owners = [(r, s) for s, r in (free[job.index] for job in jobs)]
        busiest, best = self._relieved(jobs, owners, rows, columns, load)
        staged = TwoStageLpt()(jobs, rows, columns, load)
        if makespan(loads(jobs, staged, rows, columns, load)) < busiest:
            best = self._relieved(jobs, staged, rows, columns, load)[1]
        return best

    def _relieved(
        self, jobs: Sequence[Job], owners: list[GridPosition], rows: int, columns: int, load: LoadByRank
    ) -> tuple[float, list[GridPosition]]:
        """Improve a plan by swaps.

        Returns:
            The makespan of a plan that is at least as good as `owners`, and that plan.
        """
        before = loads(jobs, owners, rows, columns, load)
        swapped = SwapSearch(jobs, owners, before).run(lower_bound(jobs, rows, columns, load))
        # The search adds costs in the order of its swaps, which affects rounding. So the loads are summed again.
        after = makespan(loads(jobs, swapped, rows, columns, load))
        return (after, swapped) if after < makespan(before) else (makespan(before), owners)

    def bound(self, jobs: Sequence[Job], rows: int, columns: int, load: LoadByRank = NOTHING) -> float:
        """The factor of the guarantee above; see `Planner.bound`."""
        places = rows * columns
        factor = 3 / 2 - 1 / (2 * places) if any(load.values()) else 4 / 3 - 1 / (3 * places)
        return capped(factor, rows, columns, load, blind=False)
