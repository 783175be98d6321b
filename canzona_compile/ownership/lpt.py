"""Planners that ignore the order of the buffer: they place the most costly job first, in two stages or in one."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import ClassVar

from canzona_compile.ownership.buffer import capped
from canzona_compile.ownership.jobs import (
    NOTHING,
    GridPosition,
    Job,
    LoadByRank,
    largest_first,
    loads,
    lower_bound,
    makespan,
    places_of,
    row_loads,
    within_rows,
)

ROUNDS = 20_000  # the most moves and swaps of one search
PAIRS = 500_000  # the most pairs of kinds that one search considers; these take about a second
NEAR = 16  # how many kinds the search considers on either side of the ideal one
EQUAL = 1e-12  # relative: a smaller difference between loads is rounding

# The load that the busier of the two places would have; the kind given; the kind taken; the other place.
Swap = tuple[float, int, int, GridPosition]


class SwapSearch:
    """Improves a plan by swaps between the busiest place and another one.

    Jobs of equal cost are one *kind*. Kind 0 is "nothing": every place holds it, and a move is a swap for it. For each
    kind a heap finds the place with the least load that holds a job of that kind. A change of a load makes entries of
    the heaps stale. The search drops a stale entry when it comes to the top.
    """

    def __init__(
        self, jobs: Sequence[Job], owners: Sequence[GridPosition], total: Mapping[GridPosition, float]
    ) -> None:
        self.total = dict(total)
        self.costs = sorted({0.0, *(job.cost for job in jobs)})
        kinds = {cost: kind for kind, cost in enumerate(self.costs)}
        self.held: dict[GridPosition, dict[int, list[int]]] = {place: {0: []} for place in total}
        self.jobs, self.owners = jobs, {job.index: place for job, place in zip(jobs, owners, strict=True)}
        for job in sorted(jobs, key=lambda j: j.index):
            if job.cost:
                self.held[self.owners[job.index]].setdefault(kinds[job.cost], []).append(job.index)
        self.idlest: list[list[tuple[float, GridPosition]]] = [[] for _ in self.costs]
        for place, own in self.held.items():
            for kind in own:
                self.idlest[kind].append((self.total[place], place))
        self.busiest = [(-own, place) for place, own in total.items()]
        for heap in (*self.idlest, self.busiest):
            heapify(heap)
        self.looked = 0

    def run(self, goal: float) -> list[GridPosition]:
        """Swap until no swap relieves the busiest place, or its load is at most `goal`, or a limit is reached.

        Args:
            goal: a load in the unit of costs. `ROUNDS` and `PAIRS` are the limits.
        """
        for _ in range(ROUNDS):
            busiest = self._busiest()
            if self.total[busiest] <= goal * (1 + EQUAL) or self.looked > PAIRS:
                break
            if (swap := self._best(busiest)) is None:
                break
            self._do(busiest, swap)
        return [self.owners[job.index] for job in self.jobs]

    def _busiest(self) -> GridPosition:
        """The place with the most load."""
        while self.total[self.busiest[0][1]] != -self.busiest[0][0]:
            heappop(self.busiest)
        return self.busiest[0][1]

    def _idlest(self, kind: int) -> tuple[float, GridPosition] | None:
        """The least load of a place that holds a job of this kind, and the place; None if no place does."""
        heap = self.idlest[kind]
        while heap and (self.total[heap[0][1]] != heap[0][0] or kind not in self.held[heap[0][1]]):
            heappop(heap)
        return heap[0] if heap else None

    def _best(self, busiest: GridPosition) -> Swap | None:
        """The swap after which the busier of the two places has the least load; None if no swap helps.

        Among equal swaps it is the one that gives the cheapest job, then takes the cheapest one, then has the lowest
        place.
        """
        most = self.total[busiest]
        idlest = self._idlest(0)
        assert idlest is not None, "every place holds kind 0"
        best: Swap | None = None
        for given in sorted(self.held[busiest]):
            for taken in self._worth_taking(given, most - idlest[0]):
                self.looked += 1
                if (other := self._idlest(taken)) is None:
                    continue
                change = self.costs[given] - self.costs[taken]
                left = max(most - change, other[0] + change)
                swap = (left, given, taken, other[1])
                if left < most * (1 - EQUAL) and (best is None or swap < best):
                    best = swap
        return best

    def _worth_taking(self, given: int, difference: float) -> list[int]:
        """The kinds to consider in return for the kind `given`.

        These are `NEAR` kinds on either side of the one that would make the two places equal, and "nothing". None of
        them moves more than `difference`: that would only make the idlest place the busiest one.
        """
        cheapest = bisect_right(self.costs, self.costs[given] - difference)
        even = bisect_left(self.costs, self.costs[given] - difference / 2)
        near = list(range(max(cheapest, even - NEAR), min(given, even + NEAR)))
        return near if cheapest or 0 in near or not given else [0, *near]

    def _do(self, busiest: GridPosition, swap: Swap) -> None:
        """Carry out a swap of the busiest place."""
        _, given, taken, other = swap
        change = self.costs[given] - self.costs[taken]
        self._hand_over(given, busiest, other)
        self._hand_over(taken, other, busiest)
        for place, more in ((busiest, -change), (other, change)):
            self.total[place] += more
            heappush(self.busiest, (-self.total[place], place))
            for kind in self.held[place]:
                heappush(self.idlest[kind], (self.total[place], place))

    def _hand_over(self, kind: int, giver: GridPosition, taker: GridPosition) -> None:
        """Move the job of this kind that has the lowest index."""
        if kind:
            own = self.held[giver][kind]
            job = own.pop(0)
            if not own:
                del self.held[giver][kind]
            insort(self.held[taker].setdefault(kind, []), job)
            self.owners[job] = taker


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
    about: ClassVar[str] = "largest first, to replicas and then to ranks within"

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
    about: ClassVar[str] = "largest first over all ranks, then swaps"

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
