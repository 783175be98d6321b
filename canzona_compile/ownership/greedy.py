"""The greedy rule that planners share (the largest job goes to the least loaded bin), and their second stage."""

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
