"""The static rule of Canzona's authors: the row in whose shard of the buffer a job starts owns the job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from canzona_compile.ownership.buffer import (
    BUCKET,
    Shards,
    capped,
    check_bucket,
    density_ratio,
    in_buckets,
    length,
    overhang,
    rows_of,
)
from canzona_compile.ownership.greedy import within_rows
from canzona_compile.ownership.jobs import NOTHING, GridPosition, Job, LoadByRank


@dataclass(frozen=True, slots=True)
class StaticStart:
    """Cuts each bucket into equal chunks, one per row. The row in whose chunk a job starts owns the job.

    The columns of a row share its jobs, largest first by elements. This is the static layout of Canzona (arXiv
    2602.06079). The planner reads the elements of jobs only, neither their costs nor `load`.

    Guarantee: over W = R x S places, the makespan is at most d * (2 + (k - 1)/S) times the optimum, and at most W
    times. d is the ratio of the largest to the smallest cost per element (`density_ratio`). k is the sum of the largest
    job of each bucket, divided by the largest job of all (`overhang`); it is at most the number of buckets. If ranks
    have a load already, the first factor is one more, as `capped` explains.

    Proof, with E the number of elements of all jobs and p_max that of the largest one:
        1. In a bucket of B elements all jobs of a row, except its last one, lie within its chunk of B/R elements. So
           the row gets at most B/R + p, where p is the largest job of the bucket.
        2. Over all buckets a row gets at most E/R + k * p_max.
        3. Largest first gives a column at most 1/S of its row plus (1 - 1/S) * p_max. That is at most
           E/W + (1 + (k - 1)/S) * p_max.
        4. Let c be the smallest cost per element. The optimum is at least the mean over all places, which is at least
           c * E/W. It is also at least the cost of the largest job, which is at least c * p_max.
        5. The plan pays at most d * c per element. So by step 3 it costs at most d * (1 + 1 + (k - 1)/S) times the
           optimum.

    Attributes:
        bucket: a bucket closes when it has at least so many elements.
    """

    bucket: int = BUCKET

    name: ClassVar[str] = "static"

    def __post_init__(self) -> None:
        check_bucket(self.bucket)

    def __call__(self, jobs: Sequence[Job], rows: int, columns: int, load: LoadByRank) -> list[GridPosition]:
        return within_rows(jobs, rows_of(self.shards(jobs, rows)), columns, "elements", load)

    def shards(self, jobs: Sequence[Job], rows: int) -> Shards:
        """Deal the jobs to rows.

        Args:
            jobs: the jobs.
            rows: the number of rows.

        Returns:
            For each bucket and each row, the jobs of the row in the order of the buffer.
        """
        found: Shards = []
        for bucket in in_buckets(jobs, self.bucket):
            whole, start = length(bucket), 0
            found.append([[] for _ in range(rows)])
            for job in bucket:
                # A job without elements may start at the end of the bucket, or the bucket may have no elements.
                found[-1][min(rows - 1, start * rows // max(1, whole))].append(job)
                start += job.elements
        return found

    def bound(self, jobs: Sequence[Job], rows: int, columns: int, load: LoadByRank = NOTHING) -> float:
        """The factor of the guarantee above; see `Planner.bound`."""
        k = overhang(jobs, self.bucket)
        return capped(density_ratio(jobs) * (2 + (k - 1) / columns), rows, columns, load, blind=True)
