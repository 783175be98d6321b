"""Jobs that need an owner rank, and measures of how good a choice of owners is.

A job is one matrix that one rank computes once per step. The ranks form a grid with a row per replica (data parallel)
and a column per shard (tensor parallel). Costs may have any unit, FLOPs or seconds, if all costs have the same one.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from itertools import accumulate
from operator import attrgetter
from types import MappingProxyType
from typing import ClassVar, Literal, Protocol, TypeVar

GridPosition = tuple[int, int]  # (replica row r, shard column s)
LoadByRank = Mapping[GridPosition, float]

NOTHING: LoadByRank = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Job:
    """One matrix.

    Attributes:
        index: its position in registration order; no two jobs share one.
        cost: the cost to compute it once, in FLOPs or seconds; never negative.
        elements: how many elements its fragment has in the buffer of a data-parallel rank: those of the whole matrix,
            divided by the number of ranks that shard it.
    """

    name: str
    index: int
    cost: float
    elements: int


class Planner(Protocol):
    """Chooses the owner rank of each job.

    `load` is the cost that ranks have already; ranks that it leaves out have none. The choice depends on the arguments
    only, and not on the order of the jobs, so ranks that plan by themselves make the same choice.
    """

    name: ClassVar[str]
    about: ClassVar[str]  # in a few words, for pages

    def __call__(self, jobs: Sequence[Job], rows: int, columns: int, load: LoadByRank) -> list[GridPosition]:
        """The owner (r, s) of each job, in the order of `jobs`; 0 <= r < rows, 0 <= s < columns."""
        ...

    def bound(self, jobs: Sequence[Job], rows: int, columns: int, load: LoadByRank = NOTHING) -> float:
        """A proven factor: the plan's makespan is at most this many times the least one. Finite and at least 1."""
        ...


def loads(
    jobs: Sequence[Job], owners: Sequence[GridPosition], rows: int, columns: int, load: LoadByRank = NOTHING
) -> dict[GridPosition, float]:
    """The cost of each place, including `load`. All places are listed, in the order of their ranks."""
    total = {place: load.get(place, 0.0) for place in places_of(rows, columns)}
    # The order of the sum does not depend on the order of the list, so the rounding does not either.
    for job, place in sorted(zip(jobs, owners, strict=True), key=lambda pair: pair[0].index):
        total[place] += job.cost
    return total


def makespan(own: LoadByRank) -> float:
    """The cost of the busiest place."""
    return max(own.values())


def imbalance(own: LoadByRank) -> float:
    """The cost of the busiest place divided by the mean cost: 1 is perfect. It is also 1 if there is nothing to do."""
    mean = sum(own.values()) / len(own)
    return max(own.values()) / mean if mean else 1.0


def places_of(rows: int, columns: int) -> list[GridPosition]:
    """All places, in the order of their ranks r * columns + s."""
    return [(r, s) for r in range(rows) for s in range(columns)]


def row_loads(rows: int, load: LoadByRank) -> list[float]:
    """The total load of the ranks of each row."""
    total = [0.0] * rows
    for (r, _), own in sorted(load.items()):
        total[r] += own
    return total


def lower_bound(jobs: Sequence[Job], rows: int, columns: int, load: LoadByRank = NOTHING) -> float:
    """A lower bound of the makespan over all choices of owners.

    It is the largest of these: the mean cost over W places; the load that the fullest place has already; the least load
    plus the largest job; and, for every k, the least load plus the k + 1 smallest of the kW + 1 largest jobs, because
    some place must have k + 1 of these.
    """
    places = rows * columns
    least = min(load.get(place, 0.0) for place in places_of(rows, columns))
    costs = sorted((job.cost for job in jobs), reverse=True)
    found = max(math.fsum([*costs, *load.values()]) / places, *load.values(), 0.0)
    upto = [0.0, *accumulate(costs)]
    for last in range(0, len(costs), places):
        found = max(found, least + upto[last + 1] - upto[last - last // places])
    return found


Quantity = Literal["cost", "elements"]
Rows = Mapping[int, int]  # by index of a job
Bin = TypeVar("Bin", int, GridPosition)


def largest_first(jobs: Iterable[Job], bins: Mapping[Bin, float], by: Quantity) -> dict[int, Bin]:
    """Put each job, the largest first, into the bin that has the least load at that time.

    If jobs are equal, the one of lower index comes first. If bins are equal, the lower bin is taken.

    Args:
        bins: for each bin, its load before the first job, in the unit of `by`.
        by: the size of a job: "cost" or "elements".
    """
    weight = attrgetter(by)
    heap = [(float(own), name) for name, own in bins.items()]
    heapify(heap)
    chosen: dict[int, Bin] = {}
    for job in sorted(jobs, key=lambda j: (-weight(j), j.index)):
        own, name = heap[0]
        chosen[job.index] = name
        heapreplace(heap, (own + weight(job), name))
    return chosen


def within_rows(jobs: Sequence[Job], rows: Rows, columns: int, by: Quantity, load: LoadByRank) -> list[GridPosition]:
    """The second stage of planners: distribute the jobs of each row over its columns, the largest first.

    The authors of Canzona use `by="elements"` inside a data-parallel rank, for one micro-group.

    Args:
        by: the size of a job: "cost" or "elements".

    Returns:
        The owner (r, s) of each job, in the order of `jobs`.
    """
    members: dict[int, list[Job]] = defaultdict(list)
    for job in jobs:
        members[rows[job.index]].append(job)
    hosts: dict[int, int] = {}
    for r, own in members.items():
        hosts |= largest_first(own, {s: load.get((r, s), 0.0) if by == "cost" else 0.0 for s in range(columns)}, by)
    return [(rows[job.index], hosts[job.index]) for job in jobs]
