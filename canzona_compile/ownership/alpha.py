"""The alpha-balanced rule of Canzona's authors: it cuts buckets between jobs and balances rows over all buckets."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import ClassVar

from canzona_compile.errors import CanzonaError
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
from canzona_compile.ownership.jobs import NOTHING, GridPosition, Job, LoadByRank, Rows, row_loads, within_rows


@dataclass(frozen=True, slots=True)
class AlphaBalanced:
    """Gives each row one run of jobs per bucket, and gives longer runs to rows that own little so far.

    The planner takes the longest bucket first. In a bucket of B elements, the target of a row is (1 - alpha) * B/R
    plus alpha times a part of B in proportion to what the row lacks. A row lacks E/R minus the elements that it owns,
    and never less than nothing. E is the number of elements of all jobs, and R the number of rows. The targets follow
    one another and so give the cuts between rows. The planner moves each cut to the nearest boundary between two jobs,
    and to the earlier boundary if two are equally near.

    The planner returns this plan if its busiest row costs strictly less than by `static_start`, `load` included.
    Otherwise it returns that plan. Costs decide nothing else. The columns of a row share its jobs, largest first
    by elements. This is the alpha-balanced partition of Canzona (arXiv 2602.06079).

    Guarantee: the busiest *row* never costs more than by `static_start`. Over W = R x S places, the makespan is at
    most d * (2 + m + (k - 1)/S) times the optimum, and at most W times. d is the ratio of the largest to the smallest
    cost per element (`density_ratio`). k is the sum of the largest job of each bucket, divided by the largest job of
    all (`overhang`); it is at most the number of buckets. m is 1 - alpha if S > 1 and alpha > 0, and 0 otherwise. If
    ranks have a load already, the first factor is one more, as `capped` explains.

    Proof, with E the number of elements of all jobs and p_max that of the largest one:
        1. By `static_start`, in a bucket of B elements all jobs of a row, except its last one, lie within its chunk of
           B/R elements. So the row gets at most B/R + p, where p is the largest job of the bucket, and at most
           E/R + k * p_max over all buckets.
        2. A shard of this rule exceeds its target by at most p: each of its two cuts moves by p/2 at most.
        3. All rows together lack at least what is left to deal out, and so at least B. So the part in proportion to
           what a row lacks is never more than the row lacks.
        4. With alpha = 0 a row gets at most B/R + p of each bucket. With alpha = 1 a row that lacks L gets at most
           L + p. In both cases it ends with at most E/R + k * p_max elements, as by `static_start`.
        5. With an alpha between 0 and 1, rows that lack nothing get (1 - alpha) * B/R of each bucket in addition. All
           buckets together add at most m * E/R. For S = 1, where each row is one place, the row costs no more than by
           `static_start`, so m is 0.
        6. Largest first gives a column at most 1/S of its row plus (1 - 1/S) * p_max. That is at most
           (1 + m) * E/W + (1 + (k - 1)/S) * p_max.
        7. Let c be the smallest cost per element. The optimum is at least the mean over all places, which is at least
           c * E/W. It is also at least the cost of the largest job, which is at least c * p_max. The plan pays at most
           d * c per element.

    Attributes:
        alpha: 0 balances each bucket by itself; 1 balances rows over all buckets.
        bucket: a bucket closes when it has at least so many elements.
    """

    alpha: float = 1.0
    bucket: int = BUCKET

    name: ClassVar[str] = "alpha"
    about: ClassVar[str] = "cuts of the buffer balanced by elements (Canzona's algorithm 1)"

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise CanzonaError(f"alpha={self.alpha} is not between 0 and 1", hint="1 balances most")
        check_bucket(self.bucket)

    def __call__(self, jobs: Sequence[Job], rows: int, columns: int, load: LoadByRank) -> list[GridPosition]:
        static = rows_of(static_start(jobs, rows, self.bucket))
        balanced = rows_of(self.shards(jobs, rows))
        taken = min(static, balanced, key=lambda plan: busiest_row(jobs, plan, rows, load))  # static wins a tie
        return within_rows(jobs, taken, columns, "elements", load)

    def shards(self, jobs: Sequence[Job], rows: int) -> Shards:
        """Deal the jobs to rows, without the comparison with the static plan."""
        buckets = in_buckets(jobs, self.bucket)
        goal = length(jobs) / rows
        load = [0.0] * rows
        found: Shards = [[] for _ in buckets]
        for number in sorted(range(len(buckets)), key=lambda i: (-length(buckets[i]), i)):
            bucket = buckets[number]
            cuts = self._cuts([0, *accumulate(job.elements for job in bucket)], goal, load)
            for r, (first, last) in enumerate(pairwise(cuts)):
                found[number].append(bucket[first:last])
                load[r] += length(bucket[first:last])
        return found

    def _cuts(self, ends: list[int], goal: float, load: list[float]) -> list[int]:
        """Cut one bucket.

        Args:
            ends: the boundaries between the jobs of the bucket, in elements; the first one is 0.
            goal: E/R, in elements.
            load: the elements that each row owns so far.

        Returns:
            Positions in `ends`, one more than rows. Row r gets the jobs between the r-th and the next one.
        """
        rows, whole = len(load), ends[-1]
        lack = [max(0.0, goal - own) for own in load]
        lacking = sum(lack)
        cuts, target = [0], 0.0
        for own in lack[:-1]:
            share = own / lacking * whole if lacking > 1e-9 * whole else whole / rows
            target += (1 - self.alpha) * whole / rows + self.alpha * share
            cuts.append(max(cuts[-1], nearest(ends, target)))
        return [*cuts, len(ends) - 1]

    def bound(self, jobs: Sequence[Job], rows: int, columns: int, load: LoadByRank = NOTHING) -> float:
        """The factor of the guarantee above; see `Planner.bound`."""
        k = overhang(jobs, self.bucket)
        more = 1 - self.alpha if self.alpha and columns > 1 else 0.0
        return capped(density_ratio(jobs) * (2 + more + (k - 1) / columns), rows, columns, load, blind=True)


def static_start(jobs: Sequence[Job], rows: int, bucket: int = BUCKET) -> Shards:
    """The static layout of Canzona: each bucket is cut into equal chunks; a row owns the jobs that start in its own."""
    found: Shards = []
    for own in in_buckets(jobs, bucket):
        whole, start = length(own), 0
        found.append([[] for _ in range(rows)])
        for job in own:
            # A job without elements may start at the end of the bucket, or the bucket may have no elements.
            found[-1][min(rows - 1, start * rows // max(1, whole))].append(job)
            start += job.elements
    return found


def nearest(ends: list[int], target: float) -> int:
    """Find the boundary that is closest to a target.

    Args:
        target: in the unit of `ends`.

    Returns:
        The position in `ends`: the earlier one if two are equally close, and the first of equal boundaries.
    """
    above = min(bisect_left(ends, target), len(ends) - 1)
    below = bisect_left(ends, ends[max(0, above - 1)])
    return below if target - ends[below] <= abs(ends[above] - target) else above


def busiest_row(jobs: Sequence[Job], plan: Rows, rows: int, load: LoadByRank) -> float:
    """The cost of the busiest row, which is the sum over its columns."""
    total = row_loads(rows, load)
    for job in sorted(jobs, key=lambda j: j.index):
        total[plan[job.index]] += job.cost
    return max(total)
