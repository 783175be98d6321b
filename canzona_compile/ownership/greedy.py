"""Largest first onto the least loaded: the rule that planners share, and their second stage."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from heapq import heapify, heapreplace
from operator import attrgetter
from typing import Literal, TypeVar

from canzona_compile.ownership.jobs import GridPosition, Job, LoadByRank

Quantity = Literal["cost", "elements"]
Rows = Mapping[int, int]  # by index of a job
Bin = TypeVar("Bin", int, GridPosition)


def largest_first(jobs: Iterable[Job], bins: Mapping[Bin, float], by: Quantity) -> dict[int, Bin]:
    """The bin of each job, by its index: largest first, each into the bin that has least by then.

    Ties go to the job of lower index and to the lower bin. `bins` says what each has to begin with, in the same unit.
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
    """Second stage: hosts among the columns of the row that owns a job, largest first.

    `by="elements"` is what the authors of Canzona do inside a data-parallel rank, for one micro-group. What places have
    from elsewhere is a cost, so it counts with `by="cost"` alone.
    """
    members: dict[int, list[Job]] = defaultdict(list)
    for job in jobs:
        members[rows[job.index]].append(job)
    hosts: dict[int, int] = {}
    for r, own in members.items():
        hosts |= largest_first(own, {s: load.get((r, s), 0.0) if by == "cost" else 0.0 for s in range(columns)}, by)
    return [(rows[job.index], hosts[job.index]) for job in jobs]
