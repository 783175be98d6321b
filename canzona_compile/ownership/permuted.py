"""A planner that permutes jobs within buckets, so that the shards of all rows have about the same length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from typing import ClassVar

from canzona_compile.ownership.buffer import (
    BUCKET,
    Shards,
    capped,
    check_bucket,
    density_ratio,
    in_buckets,
    overhang,
    rows_of,
)
from canzona_compile.ownership.greedy import within_rows
from canzona_compile.ownership.jobs import NOTHING, GridPosition, Job, LoadByRank, row_loads


@dataclass(frozen=True, slots=True)
class Permuted:
    """Within a bucket, jobs are dealt to rows by elements; padded to the longest shard, collectives are uniform.

    Largest first to the row that has the fewest elements of this bucket, of those to the row with the least cost so
    far, then to the lowest. `buffer.padding(planner.shards(...))` is what uniformity costs, `buffer.order` the new
    order of the buffer. A bucket wants several jobs per row: with fewer jobs than rows most of it is padding. Columns
    share the jobs of a row, largest first by cost.

    Guarantee, over W = R x S places, with d and k as in `StaticStart`: d * (1 + (1 - 1/R) * k/S) + 1 - 1/S times the
    optimum. Of a bucket of B elements a row gets at most B/R + (1 - 1/R) * p, p being the bucket's largest job, since
    before its last job it had fewest; altogether E/R + (1 - 1/R) * k * p_max, at the largest density at most. Columns
    add (1 - 1/S) of the largest cost to a S-th of that. With loads from elsewhere, one more.

    Attributes:
        bucket: a bucket closes when it has at least so many elements.
    """

    bucket: int = BUCKET

    name: ClassVar[str] = "permuted"

    def __post_init__(self) -> None:
        check_bucket(self.bucket)

    def __call__(self, jobs: Sequence[Job], rows: int, columns: int, load: LoadByRank) -> list[GridPosition]:
        return within_rows(jobs, rows_of(self.shards(jobs, rows, load)), columns, "cost", load)

    def shards(self, jobs: Sequence[Job], rows: int, load: LoadByRank = NOTHING) -> Shards:
        """For each bucket and each row, the jobs that the row owns, in reverse registration order."""
        cost = row_loads(rows, load)
        found: Shards = []
        for bucket in in_buckets(jobs, self.bucket):
            shards: list[list[Job]] = [[] for _ in range(rows)]
            heap = [(0, cost[r], r) for r in range(rows)]
            heapify(heap)
            for job in sorted(bucket, key=lambda j: (-j.elements, j.index)):
                elements, _, r = heap[0]
                shards[r].append(job)
                cost[r] += job.cost
                heapreplace(heap, (elements + job.elements, cost[r], r))
            found.append([sorted(shard, key=lambda j: -j.index) for shard in shards])
        return found

    def bound(self, jobs: Sequence[Job], rows: int, columns: int, load: LoadByRank = NOTHING) -> float:
        share = (1 - 1 / rows) * overhang(jobs, self.bucket) / columns
        return capped(density_ratio(jobs) * (1 + share) + 1 - 1 / columns, rows, columns, load, blind=True)
