"""Planners that ignore the order of the buffer: largest cost first, in two stages or over all places at once."""

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
    """Assign jobs, the largest cost first, to the row with the least load, then to its column with the least load.

    Guarantee: in a single row or column that of `Joint`. Else 2 - 1/W times the optimum over W = R x S places, loads
    included. Where the busiest place got its last job, it had least of its row: at most a S-th of the row, without
    that job. Likewise the row has at most an R-th of everything and (1 - 1/R) of its own last job. Put together, the
    mean plus (1 - 1/W) of the largest job, and the optimum is at least either.
    """

    name: ClassVar[str] = "lpt"

    def __call__(self, jobs: Sequence[Job], rows: int, columns: int, load: LoadByRank) -> list[GridPosition]:
        owned = largest_first(jobs, dict(enumerate(row_loads(rows, load))), "cost")
        return within_rows(jobs, owned, columns, "cost", load)

    def bound(self, jobs: Sequence[Job], rows: int, columns: int, load: LoadByRank = NOTHING) -> float:
        if 1 in (rows, columns):
            return Joint().bound(jobs, rows, columns, load)
        return capped(2 - 1 / (rows * columns), rows, columns, load, blind=False)


@dataclass(frozen=True, slots=True)
class Joint:
    """Largest cost first to whichever place has least; then swaps that relieve the busiest place (`exchange.py`).

    Ties go to the lower index, to the lowest column and then to the lowest row: jobs alike spread over the replicas,
    which then have equally much to exchange. Never worse than without the swaps, nor than
    `TwoStageLpt`, from whose plan the swaps start anew in the rare case that it is better still.

    Guarantee, over W places: 4/3 - 1/(3W) times the optimum (Graham 1969) if nothing is there before, otherwise
    3/2 - 1/(2W) (Lee 1991). For the second, leave out what comes after the last job j of the busiest place. Before j
    that place had at most the mean without j: if j is at most half the optimum, that and (1 - 1/W) * j are within the
    bound. If it is more, the optimum has at most one of these jobs on a place, best the i-th largest on the i-th
    emptiest place. The rule does no worse: of the i emptiest places one still has only its load when the i-th job
    comes.
    """

    name: ClassVar[str] = "joint"

    def __call__(self, jobs: Sequence[Job], rows: int, columns: int, load: LoadByRank) -> list[GridPosition]:
        # Columns come before rows in the keys, so that among equals the lowest column comes first, with all its rows.
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
        """The makespan of a plan that is at least as good, and that plan."""
        before = loads(jobs, owners, rows, columns, load)
        swapped = SwapSearch(jobs, owners, before).run(lower_bound(jobs, rows, columns, load))
        # The order of the swaps affects rounding, so the loads that count are summed again.
        after = makespan(loads(jobs, swapped, rows, columns, load))
        return (after, swapped) if after < makespan(before) else (makespan(before), owners)

    def bound(self, jobs: Sequence[Job], rows: int, columns: int, load: LoadByRank = NOTHING) -> float:
        places = rows * columns
        factor = 3 / 2 - 1 / (2 * places) if any(load.values()) else 4 / 3 - 1 / (3 * places)
        return capped(factor, rows, columns, load, blind=False)
