"""A rank's flat buffer: buckets in reverse registration order, each cut into one shard per row.

Buffers have that order because gradients become final roughly in reverse registration order. This model leaves out the
alignment between jobs, which at 64 elements is negligible beside a matrix.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from canzona_compile.errors import CanzonaError
from canzona_compile.ownership.jobs import Job, LoadByRank

BUCKET = 400_000_000  # elements, as in the authors' scripts

Shards = list[list[list[Job]]]  # for each bucket and each row, its jobs in the order of the buffer


def check_bucket(bucket: int) -> None:
    """Raise CanzonaError if `bucket` is no valid size of a bucket in elements."""
    if bucket < 1:
        raise CanzonaError(f"bucket={bucket} is not a number of elements", hint="400_000_000 is customary")


def in_buckets(jobs: Sequence[Job], bucket: int) -> list[list[Job]]:
    """The jobs in the order of the buffer; a bucket closes as soon as it has at least `bucket` elements."""
    buckets: list[list[Job]] = []
    room = 0
    for job in sorted(jobs, key=lambda j: -j.index):
        if room <= 0:
            buckets.append([])
            room = bucket
        buckets[-1].append(job)
        room -= job.elements
    return buckets


def length(jobs: Sequence[Job]) -> int:
    return sum(job.elements for job in jobs)


def rows_of(shards: Shards) -> dict[int, int]:
    """The row of each job, by its index."""
    return {job.index: r for bucket in shards for r, shard in enumerate(bucket) for job in shard}


# -- parts of the bounds of rules by elements ----------------------------------------------


def density_ratio(jobs: Sequence[Job]) -> float:
    """d: the ratio of the largest to the smallest cost per element; infinite if a cost or an element count is zero."""
    own = [job for job in jobs if job.cost or job.elements]
    if not all(job.cost and job.elements for job in own):
        return math.inf
    densities = [job.cost / job.elements for job in own]
    return max(densities) / min(densities) if own else 1.0


def overhang(jobs: Sequence[Job], bucket: int) -> float:
    """k: the sum of the largest job of each bucket, divided by the largest job of all.

    It is at least 1 and at most the number of buckets.
    """
    largest = [max(job.elements for job in own) for own in in_buckets(jobs, bucket)]
    return sum(largest) / max(largest) if any(largest) else 1.0


def capped(factor: float, rows: int, columns: int, load: LoadByRank, *, blind: bool) -> float:
    """Extend a proven factor to places that have a load, and make it finite.

    A planner that is `blind` to loads may add its whole makespan to the fullest place, whose load is at most the
    optimum; the factor then grows by one. The worst plan puts everything on one of W places, which is W times the mean.
    """
    return min(float(rows * columns), factor + (blind and any(load.values())))
