"""The rule of Canzona's authors without balancing: a job belongs to the row whose shard of the buffer it starts in."""

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
    """Each bucket is cut into equal chunks, one per row; the row in whose chunk a job starts owns it.

    Then the columns of a row share its jobs, largest first by elements. This is the static layout of Canzona (arXiv
    2602.06079). It looks at elements alone: neither at costs nor at `load`.

    Guarantee, over W = R x S places: d * (2 + (k - 1)/S) times the optimum, and never more than W. d is the ratio of
    the largest to the smallest cost per element, k at most the number of buckets (`density_ratio`, `overhang`). In a
    bucket of B elements all jobs of a row but its last lie within B/R, so that the row gets at most B/R + p of it, p
    being the bucket's largest job; altogether E/R + k * p_max. Largest first leaves a column at most a S-th of that
    plus (1 - 1/S) * p_max. The optimum is at least the mean and at least the largest job, which by elements are E/W
    and p_max, each at the smallest density or above; the plan pays the largest one at most. With loads from
    elsewhere, one more.

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
        """For each bucket and each row, the jobs that the row owns."""
        found: Shards = []
        for bucket in in_buckets(jobs, self.bucket):
            whole, start = length(bucket), 0
            found.append([[] for _ in range(rows)])
            for job in bucket:
                # Empty fragments may start at the very end, or in a bucket without elements.
                found[-1][min(rows - 1, start * rows // max(1, whole))].append(job)
                start += job.elements
        return found

    def bound(self, jobs: Sequence[Job], rows: int, columns: int, load: LoadByRank = NOTHING) -> float:
        k = overhang(jobs, self.bucket)
        return capped(density_ratio(jobs) * (2 + (k - 1) / columns), rows, columns, load, blind=True)
