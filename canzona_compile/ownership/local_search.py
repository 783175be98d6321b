"""Improve a plan step by step: move a job away from the busiest place, or swap it with a cheaper one elsewhere."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush

from canzona_compile.ownership.jobs import GridPosition, Job

ROUNDS = 20_000  # most moves and swaps
PAIRS = 500_000  # most kinds of swaps that are considered in all rounds together; this takes about a second
NEAR = 16  # how many kinds are considered on either side of the ideal one
EQUAL = 1e-12  # a smaller difference between loads is rounding

Swap = tuple[
    float, int, int, GridPosition
]  # what the busier of two is left with; cost given, cost taken, the other place


class SwapSearch:
    """An assignment that swaps improve. Jobs of equal cost are one kind; a move is a swap for the kind "nothing".

    For each kind a heap knows the least loaded place that holds one. Entries become stale when a load changes and are
    dropped when they come up.
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
        """Swap until no swap helps the busiest place, its load is at most `goal`, or ROUNDS or PAIRS are used up."""
        for _ in range(ROUNDS):
            busiest = self._busiest()
            if self.total[busiest] <= goal * (1 + EQUAL) or self.looked > PAIRS:
                break
            if (swap := self._best(busiest)) is None:
                break
            self._do(busiest, swap)
        return [self.owners[job.index] for job in self.jobs]

    def _busiest(self) -> GridPosition:
        while self.total[self.busiest[0][1]] != -self.busiest[0][0]:
            heappop(self.busiest)
        return self.busiest[0][1]

    def _idlest(self, kind: int) -> tuple[float, GridPosition] | None:
        heap = self.idlest[kind]
        while heap and (self.total[heap[0][1]] != heap[0][0] or kind not in self.held[heap[0][1]]):
            heappop(heap)
        return heap[0] if heap else None

    def _best(self, busiest: GridPosition) -> Swap | None:
        """The swap after which the busier of the two places has the least load.

        Among equal swaps it is the one of the cheapest job, and then of the lowest place.
        """
        most = self.total[busiest]
        idlest = self._idlest(0)
        assert idlest is not None, "every place holds nothing, too"
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
        """The kinds to take in return: NEAR on either side of the one that would even out two places, and "nothing".

        A swap that moves more than the difference to the idlest place would only make that place the busiest.
        """
        cheapest = bisect_right(self.costs, self.costs[given] - difference)
        even = bisect_left(self.costs, self.costs[given] - difference / 2)
        near = list(range(max(cheapest, even - NEAR), min(given, even + NEAR)))
        return near if cheapest or 0 in near or not given else [0, *near]

    def _do(self, busiest: GridPosition, swap: Swap) -> None:
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
        if kind:
            own = self.held[giver][kind]
            job = own.pop(0)
            if not own:
                del self.held[giver][kind]
            insort(self.held[taker].setdefault(kind, []), job)
            self.owners[job] = taker
