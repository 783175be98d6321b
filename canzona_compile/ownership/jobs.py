"""What has to be owned, and how good a choice of owners is.

A job is one matrix, computed once per step by one rank. The ranks form a grid: a row per replica (data parallel), a
column per shard (tensor parallel). Costs are in whatever unit the caller weighs jobs by, FLOPs or seconds, as long as
it is one unit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType
from typing import ClassVar, Protocol

GridPosition = tuple[int, int]  # (replica row r, shard column s)
LoadByRank = Mapping[GridPosition, float]

NOTHING: LoadByRank = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Job:
    """One matrix.

    Attributes:
        index: its position in registration order; no two jobs share one.
        cost: of computing it once: FLOPs or seconds, never negative.
        elements: of its fragment in the buffer of a data-parallel rank, that is of the whole matrix divided by the
            ranks that shard it.
    """

    name: str
    index: int
    cost: float
    elements: int


class Planner(Protocol):
    """Chooses who computes what.

    `load` is the cost that ranks have from elsewhere, zero for those that it leaves out. The choice depends on the jobs
    and on nothing else, not on the order in which they are listed: ranks that plan alone agree.
    """

    name: ClassVar[str]

    def __call__(self, jobs: Sequence[Job], rows: int, columns: int, load: LoadByRank) -> list[GridPosition]:
        """The owner (r, s) of each job, in the order of `jobs`; 0 <= r < rows, 0 <= s < columns."""
        ...

    def bound(self, jobs: Sequence[Job], rows: int, columns: int, load: LoadByRank = NOTHING) -> float:
        """The proven factor: a makespan is at most this many times the least possible one. Finite, at least 1."""
        ...


def loads(
    jobs: Sequence[Job], owners: Sequence[GridPosition], rows: int, columns: int, load: LoadByRank = NOTHING
) -> dict[GridPosition, float]:
    """Cost per place, all places in the order of their ranks, `load` included."""
    total = {place: load.get(place, 0.0) for place in places_of(rows, columns)}
    # Floats are summed in one order, whatever the order of the list.
    for job, place in sorted(zip(jobs, owners, strict=True), key=lambda pair: pair[0].index):
        total[place] += job.cost
    return total


def makespan(own: LoadByRank) -> float:
    """Cost of the busiest place."""
    return max(own.values())


def imbalance(own: LoadByRank) -> float:
    """The busiest place, in mean places: 1 is perfect. Also 1 if there is nothing to do."""
    mean = sum(own.values()) / len(own)
    return max(own.values()) / mean if mean else 1.0


def places_of(rows: int, columns: int) -> list[GridPosition]:
    """All places, in the order of their ranks r * columns + s."""
    return [(r, s) for r in range(rows) for s in range(columns)]


def row_loads(rows: int, load: LoadByRank) -> list[float]:
    """What the ranks of each row have together."""
    total = [0.0] * rows
    for (r, _), own in sorted(load.items()):
        total[r] += own
    return total


def lower_bound(jobs: Sequence[Job], rows: int, columns: int, load: LoadByRank = NOTHING) -> float:
    """A cost below which no choice of owners can bring the busiest place.

    The largest of: the mean over W places; the load that the fullest place has already; the least load plus the
    largest job; and, for every k, the least load plus the k + 1 smallest of the kW + 1 largest jobs, because k + 1 of
    these must share a place.
    """
    places = rows * columns
    least = min(load.get(place, 0.0) for place in places_of(rows, columns))
    costs = sorted((job.cost for job in jobs), reverse=True)
    found = max(math.fsum([*costs, *load.values()]) / places, *load.values(), 0.0)
    upto = [0.0, *accumulate(costs)]
    for last in range(0, len(costs), places):
        found = max(found, least + upto[last + 1] - upto[last - last // places])
    return found
