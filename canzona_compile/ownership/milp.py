"""Decide which makespans are possible by integer programs, which HiGHS solves through scipy.

Jobs of equal cost are one *kind*. The variables are *patterns*: a pattern says how many jobs of each kind a place
takes. Places with equal load are interchangeable, so it only matters how many of them take which pattern. The
coefficients are small integers, not costs, and no two solutions differ by interchangeable places alone. If no place may
have more than a makespan, each place has at least what the others then leave of the total. This rules out most
patterns.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from canzona_compile.ownership.jobs import GridPosition, Job, LoadByRank, places_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Counts = NDArray[np.int64]  # [any, kinds]

PATTERNS = 100_000  # the most patterns to list; the limit for makespans is ten times as high
COLUMNS = 30_000  # the most variables of a program
TOLERANCE = 1e-6  # makespans whose relative difference is smaller count as equal; HiGHS has the same tolerance


class GaveUp(Exception):
    """The instance is too large, or no time is left."""


class Patterns:
    """Decides which makespans up to `most` are possible.

    The patterns list all kinds except the cheapest one, whose jobs fill the room that is left. Jobs without cost are
    left out.

    Args:
        jobs: the jobs; at least one has a cost.
        rows: the number of rows.
        columns: the number of columns.
        load: the cost that ranks have already.
        most: a makespan that is known to be possible.
        deadline: when to give up, in seconds of `time.monotonic`.

    Raises:
        GaveUp: there are too many patterns.
    """

    def __init__(
        self, jobs: Sequence[Job], rows: int, columns: int, load: LoadByRank, most: float, deadline: float
    ) -> None:
        import numpy as np

        self.deadline = deadline
        self.kinds: dict[float, list[int]] = defaultdict(list)  # by cost, descending: jobs by index, ascending
        for job in sorted(jobs, key=lambda j: (-j.cost, j.index)):
            if job.cost:
                self.kinds[job.cost].append(job.index)
        self.free: dict[float, list[GridPosition]] = defaultdict(list)  # by load, ascending: places by rank, ascending
        for place in sorted(places_of(rows, columns), key=lambda p: (load.get(p, 0.0), p)):
            self.free[load.get(place, 0.0)].append(place)
        self.cost, self.jobs = np.array([*self.kinds]), np.array([len(own) for own in self.kinds.values()])
        self.load, self.places = np.array([*self.free]), np.array([len(own) for own in self.free.values()])
        self.listed, self.used = np.zeros((1, 0), np.int64), np.zeros(1)
        room, least = most - self.load[0], self._least(most) - self.load[-1]
        rest = self.cost @ self.jobs  # the cost of all kinds that patterns do not count yet
        for cost, own in zip(self.cost[:-1], self.jobs[:-1], strict=True):
            count = np.arange(min(own, int(room / cost) + 1) + 1)
            if len(self.listed) * len(count) > 20 * PATTERNS:
                raise GaveUp
            rest -= cost * own
            total = self.used[:, None] + count * cost
            which, taken = np.nonzero((total <= room) & (total + rest >= least))
            self.listed = np.concatenate([self.listed[which], count[taken, None]], axis=1)
            self.used = total[which, taken]
            if len(self.listed) > PATTERNS:
                raise GaveUp

    def _least(self, makespan: float) -> float:
        """The load that every place has if none has more than `makespan`, and what rounding may change less."""
        total = self.cost @ self.jobs + self.load @ self.places
        return float(total - (self.places.sum() - 1) * makespan - TOLERANCE * total)

    def makespans(self, above: float, below: float) -> list[float]:
        """All loads that a place can have strictly between two costs.

        Args:
            above: a lower bound of the makespan.
            below: at most `most`.

        Returns:
            The loads in ascending order, each once.

        Raises:
            GaveUp: there are too many.
        """
        import numpy as np

        cost, jobs = self.cost[-1], self.jobs[-1]
        above, below = above * (1 + TOLERANCE), below * (1 - TOLERANCE)
        own = (self.load[:, None] + self.used).ravel()
        least = np.clip(np.floor((above - own) / cost), 0, jobs + 1)
        number = np.maximum(0, np.clip(np.ceil((below - own) / cost), -1, jobs) - least + 1).astype(np.int64)
        if number.sum() > 10 * PATTERNS:
            raise GaveUp
        first = np.repeat(np.cumsum(number) - number, number)
        totals = np.repeat(own, number) + cost * (np.repeat(least, number) + np.arange(len(first)) - first)
        return [float(total) for total in np.unique(totals[(totals > above) & (totals < below)])]

    def within(self, makespan: float) -> dict[int, GridPosition] | None:
        """Find owners with which no place has more than `makespan`.

        Returns:
            The owner of each job that has a cost, by the index of the job; None if there are no such owners.

        Raises:
            GaveUp: the program is too large, or the time was not enough to solve it.
        """
        import numpy as np
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array

        makespan *= 1 + TOLERANCE / 10  # a sum of the same costs in another order has to fit as well
        least = self._least(makespan)
        parts = [self._maximal(least - load, makespan - load) for load in self.load]
        if any(not len(part) for part in parts):
            return None
        patterns = np.concatenate(parts)
        if len(patterns) > COLUMNS:
            raise GaveUp
        groups = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
        one_each = csr_array((np.ones(len(groups)), (groups, np.arange(len(groups)))))
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise GaveUp
        result: Any = milp(
            np.zeros(len(groups)),
            integrality=np.ones(len(groups)),
            bounds=Bounds(0, self.places[groups]),
            constraints=[
                LinearConstraint(csr_array(patterns.T), self.jobs, np.inf),
                LinearConstraint(one_each, 0, self.places),
            ],
            options={"time_limit": left},
        )
        if result.status == 2:
            return None
        if result.x is None:
            raise GaveUp
        free = [list(reversed(own)) for own in self.free.values()]
        taken = {free[groups[i]].pop(): patterns[i] for i, n in enumerate(np.round(result.x)) for _ in range(int(n))}
        waiting = [iter(own) for own in self.kinds.values()]
        # Patterns may take more jobs of a kind than there are; the last places then get fewer.
        return {
            job: place
            for place, counts in sorted(taken.items(), key=lambda item: item[0])
            for kind, count in zip(waiting, counts, strict=True)
            for _, job in zip(range(count), kind, strict=False)
        }

    def _maximal(self, least: float, room: float) -> Counts:
        """The patterns that cost at least `least`, fit into `room`, and to which no job can be added.

        All other patterns that a place may take are parts of them.
        """
        import numpy as np

        fits = self.used <= room
        listed, used = self.listed[fits], self.used[fits]
        last = np.minimum(self.jobs[-1], np.floor((room - used) / self.cost[-1])).astype(np.int64)
        left = room - used - last * self.cost[-1]
        smallest = np.where(listed < self.jobs[:-1], self.cost[:-1], np.inf).min(axis=1, initial=np.inf)
        kept: Counts = np.concatenate([listed, last[:, None]], axis=1)[(smallest > left) & (room - left >= least)]
        return kept
