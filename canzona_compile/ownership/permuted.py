"""A planner that reorders the jobs within each bucket so that the shards of all rows have about the same length."""

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
    """Deals the jobs of each bucket to rows by elements, the largest first.

    A job goes to the row that has the fewest elements of this bucket. Among equal rows it goes to the one with the
    least cost so far, and then to the lowest one. The columns of a row share its jobs, largest first by cost.

    Collectives are uniform if every shard is padded to the longest one of its bucket. A bucket should hold several jobs
    per row: if it has fewer jobs than rows, most of it is padding.

    Guarantee: over W = R x S places, the makespan is at most d * (1 + (1 - 1/R) * k/S) + 1 - 1/S times the optimum,
    with d and k as in `StaticStart`. If ranks have a load already, the factor is one more.

    Proof, with E and p_max as in `StaticStart`:
        1. In a bucket of B elements, a row gets its last job, of q elements, when it has the fewest elements. It has
           at most (B - q)/R then. So it ends with at most B/R + (1 - 1/R) * p, where p is the largest job.
        2. Over all buckets a row gets at most E/R + (1 - 1/R) * k * p_max elements.
        3. Largest first gives a column at most 1/S of the cost of its row, plus (1 - 1/S) of the highest cost of a job.
        4. The optimum is at least the highest cost of a job. E/W elements cost at most d times the optimum, and p_max
           elements do too (steps 4 and 5 of the proof in `StaticStart`).

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
        """Deal the jobs to rows.

        Args:
            jobs: the jobs.
            rows: the number of rows.
            load: the cost that ranks have already. It only decides between rows with equally many elements.

        Returns:
            For each bucket and each row, the jobs of the row in reverse registration order.
        """
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
        """The factor of the guarantee above; see `Planner.bound`."""
        share = (1 - 1 / rows) * overhang(jobs, self.bucket) / columns
        return capped(density_ratio(jobs) * (1 + share) + 1 - 1 / columns, rows, columns, load, blind=True)
