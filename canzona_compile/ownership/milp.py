"""Find the least makespan by integer programs, which HiGHS solves through scipy.

There are two formulations:

- *Patterns*: a pattern says how many jobs of each kind a place takes. Places with equal load are interchangeable, so it
  only matters how many of them take which pattern. The program asks whether a given makespan is possible. Its
  coefficients are small integers, not costs, and no two solutions differ by interchangeable places alone.
- *Counts*: the variables are the numbers of jobs of each kind on each place. This formulation serves instances that
  have too many patterns.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from canzona_compile.ownership.jobs import GridPosition, Job, LoadByRank, places_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Counts = NDArray[np.int64]  # [any, kinds]

PATTERNS = 100_000  # the most patterns to list; the limit for makespans is ten times as high
COLUMNS = 30_000  # the most variables of a program of patterns
ENTRIES = 5_000  # the most variables of a program of counts
TOLERANCE = 1e-6  # makespans whose relative difference is smaller count as equal; HiGHS has the same tolerance

Allotment = dict[GridPosition, tuple[int, ...]]  # for each place, how many jobs of each kind it takes


class GaveUp(Exception):
    """The instance is too large for a formulation, or no time is left."""


@dataclass(frozen=True, slots=True)
class Kinds:
    """The jobs by cost and the places by load: jobs of equal cost, and places of equal load, are interchangeable.

    Attributes:
        jobs: for each cost (a *kind*), in descending order, the jobs of that cost in order of index. Jobs without
            cost are left out.
        places: for each load, in ascending order, the places with that load in order of rank.
    """

    jobs: dict[float, list[Job]]
    places: dict[float, list[GridPosition]]

    @classmethod
    def of(cls, jobs: Sequence[Job], rows: int, columns: int, load: LoadByRank) -> Kinds:
        """Sort jobs and places by kind.

        Args:
            jobs: the jobs.
            rows: the number of rows.
            columns: the number of columns.
            load: the cost that ranks have already.
        """
        by_cost: dict[float, list[Job]] = defaultdict(list)
        by_load: dict[float, list[GridPosition]] = defaultdict(list)
        for job in sorted(jobs, key=lambda j: (-j.cost, j.index)):
            if job.cost:
                by_cost[job.cost].append(job)
        for place in places_of(rows, columns):
            by_load[load.get(place, 0.0)].append(place)
        return cls(dict(by_cost), dict(sorted(by_load.items())))

    def owners(self, allotment: Allotment) -> dict[int, GridPosition]:
        """Turn an allotment into owners.

        Args:
            allotment: may allot more jobs of a kind than there are; the last places then get fewer.

        Returns:
            The owner of each job that has a cost, by the index of the job.
        """
        left = [iter(own) for own in self.jobs.values()]
        chosen: dict[int, GridPosition] = {}
        for place, counts in sorted(allotment.items()):
            for kind, count in zip(left, counts, strict=True):
                chosen |= {job.index: place for job in islice(kind, count)}
        return chosen


class Patterns:
    """Decides by patterns which makespans up to `most` are possible.

    The patterns list all kinds except the cheapest one, whose jobs fill the room that is left.

    Args:
        kinds: the instance.
        most: a makespan that is known to be possible.
        deadline: when to give up, in seconds of `time.monotonic`.

    Raises:
        GaveUp: there are too many patterns.
    """

    def __init__(self, kinds: Kinds, most: float, deadline: float) -> None:
        import numpy as np

        self.kinds, self.deadline = kinds, deadline
        self.cost = np.array([*kinds.jobs], dtype=np.float64)
        self.jobs = np.array([len(own) for own in kinds.jobs.values()], dtype=np.int64)
        self.load = np.array([*kinds.places], dtype=np.float64)
        self.listed, self.used = np.zeros((1, 0), np.int64), np.zeros(1)
        room = most - self.load[0]
        for cost, jobs in zip(self.cost[:-1], self.jobs[:-1], strict=True):
            count = np.arange(min(jobs, int(room / cost) + 1) + 1)
            if len(self.listed) * len(count) > 20 * PATTERNS:
                raise GaveUp
            total = self.used[:, None] + count * cost
            which, taken = np.nonzero(total <= room)
            self.listed = np.concatenate([self.listed[which], count[taken, None]], axis=1)
            self.used = total[which, taken]
            if len(self.listed) > PATTERNS:
                raise GaveUp

    def makespans(self, above: float, below: float) -> list[float]:
        """All loads that a place can have strictly between two costs.

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

    def within(self, makespan: float) -> Allotment | None:
        """An allotment in which no place has more than `makespan`; None if there is none.

        Raises:
            GaveUp: the program is too large, or the time was not enough to solve it.
        """
        import numpy as np
        from scipy.sparse import csr_array

        makespan *= 1 + TOLERANCE / 10  # a sum of the same costs in another order has to fit as well
        parts = [self._maximal(makespan - load) for load in self.load]
        if any(not len(part) for part in parts):
            return None
        columns = np.concatenate(parts)
        if len(columns) > COLUMNS:
            raise GaveUp
        groups = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
        places = np.array([len(own) for own in self.kinds.places.values()])
        one_each = csr_array((np.ones(len(groups)), (groups, np.arange(len(groups)))))
        result = run(
            self.deadline,
            c=np.zeros(len(columns)),
            integrality=np.ones(len(columns)),
            bounds=(0, places[groups]),
            constraints=[(csr_array(columns.T), self.jobs, np.inf), (one_each, 0, places)],
        )
        if result.status == 2:
            return None
        if result.x is None:
            raise GaveUp
        chosen = np.round(result.x).astype(int)
        free = [list(reversed(own)) for own in self.kinds.places.values()]
        return {
            free[groups[i]].pop(): tuple(columns[i].tolist()) for i in np.flatnonzero(chosen) for _ in range(chosen[i])
        }

    def _maximal(self, room: float) -> Counts:
        """The patterns that fit into `room` and to which no job can be added. All other patterns are parts of them."""
        import numpy as np

        fits = self.used <= room
        listed, used = self.listed[fits], self.used[fits]
        last = np.minimum(self.jobs[-1], np.floor((room - used) / self.cost[-1])).astype(np.int64)
        left = room - used - last * self.cost[-1]
        smallest = np.where(listed < self.jobs[:-1], self.cost[:-1], np.inf).min(axis=1, initial=np.inf)
        kept: Counts = np.concatenate([listed, last[:, None]], axis=1)[smallest > left]
        return kept


def by_counts(kinds: Kinds, lower: float, upper: float, deadline: float) -> tuple[Allotment | None, float]:
    """Look for the least makespan by one program, whose variables are counts.

    Args:
        kinds: the instance.
        lower: a lower bound of the makespan.
        upper: a makespan that is known to be possible; it is positive.
        deadline: when to stop, in seconds of `time.monotonic`.

    Returns:
        The best allotment that was found, None if there is none, and a lower bound of the makespan.

    Raises:
        GaveUp: the program is too large, or no time is left.
    """
    import numpy as np
    from scipy.sparse import csr_array, kron

    places = [(name, load) for load, own in kinds.places.items() for name in own]
    cost, jobs = np.array([*kinds.jobs]) / upper, [len(own) for own in kinds.jobs.values()]
    load = np.array([own for _, own in places]) / upper
    size = len(places) * len(cost)
    if size > ENTRIES:
        raise GaveUp
    # The variables are the counts, place by place, and then the makespan. All costs are divided by `upper`.
    place, kind = csr_array(np.eye(len(places))), csr_array(np.eye(len(cost)))
    counted = widened(kron(csr_array(np.ones((1, len(places)))), kind))
    sums = widened(kron(place, csr_array(cost[None])))
    busiest = widened(csr_array((len(places), size)), 1.0)
    # Among places with equal load, an earlier one gets no less than a later one. So one of many equivalent solutions
    # is left.
    alike = np.flatnonzero(np.diff(load) == 0)
    falling = (place[alike] - place[alike + 1]) @ sums
    result = run(
        deadline,
        c=np.append(np.zeros(size), 1.0),
        integrality=np.append(np.ones(size), 0.0),
        bounds=(np.append(np.zeros(size), lower / upper), np.append(np.tile(jobs, len(places)), 1.0)),
        constraints=[
            (counted, jobs, jobs),
            (falling, 0, np.inf),
            (sums - busiest, -np.inf, -load),
        ],
        gap=TOLERANCE / 10,
    )
    bound = lower if result.mip_dual_bound is None else max(lower, result.mip_dual_bound * upper * (1 - TOLERANCE / 10))
    if result.x is None:
        return None, bound
    counts = np.round(result.x[:-1]).astype(int).reshape(len(places), len(cost))
    return {name: tuple(own.tolist()) for (name, _), own in zip(places, counts, strict=True)}, bound


def widened(matrix: Any, last: float = 0.0) -> Any:
    """Append a column to a sparse matrix; all entries of the column are `last`."""
    import numpy as np
    from scipy.sparse import csr_array, hstack

    return hstack([matrix, csr_array(np.full((matrix.shape[0], 1), last))], format="csr")


def run(deadline: float, *, bounds: Any, constraints: Any, gap: float = 0.0, **program: Any) -> Any:
    """Solve a program with HiGHS.

    Args:
        deadline: when to stop, in seconds of `time.monotonic`.
        bounds: the lower and upper bounds of the variables.
        constraints: for each constraint its matrix, its lower and its upper bound.
        gap: the relative gap at which a solution counts as optimal.
        program: further arguments of `scipy.optimize.milp`.

    Returns:
        The result of `scipy.optimize.milp`.

    Raises:
        GaveUp: no time is left.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp

    left = deadline - time.monotonic()
    if left <= 0:
        raise GaveUp
    return milp(
        **program,
        bounds=Bounds(*bounds),
        constraints=[LinearConstraint(*own) for own in constraints],
        options={"time_limit": left, "mip_rel_gap": gap},
    )
