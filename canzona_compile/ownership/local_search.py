"""Improve a plan step by step: move a job away from the busiest place, or swap it with a cheaper one elsewhere."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush

from canzona_compile.ownership.jobs import GridPosition, Job

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
