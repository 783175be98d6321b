"""The authors' balanced rule: cuts between jobs that even out, over all buckets, what rows own."""

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
    density_ratio,
    in_buckets,
    length,
    overhang,
    rows_of,
)
from canzona_compile.ownership.greedy import Rows, within_rows
from canzona_compile.ownership.jobs import NOTHING, GridPosition, Job, LoadByRank, row_loads
from canzona_compile.ownership.static import StaticStart


@dataclass(frozen=True, slots=True)
class AlphaBalanced:
    """Runs of jobs whose lengths blend evenness within a bucket with filling up rows that have too little.

    Buckets are taken longest first. In each, a row is to get (1 - alpha) of an even share and alpha of the bucket in
    proportion to what the row lacks to E/R elements by then. The ends of those shares, moved to the nearest boundary
    between jobs (to the earlier of two), are the cuts. Targets are in elements; costs, `load` included, only decide
    whether the plan is taken: if its busiest row has strictly less than under `StaticStart`. Otherwise the static plan
    is returned. Columns share the jobs of a row, largest first by elements. This is the alpha-balanced partition of
    Canzona (arXiv 2602.06079).

    Guarantee: the busiest *row* never costs more than under `StaticStart`. Over W = R x S places, with d and k as
    there, d * (2 + (k - 1)/S) times the optimum for S = 1, which follows from that, and for alpha of 0 or 1; otherwise
    1 - alpha more than 2. A shard exceeds its target by at most the largest job of the bucket, half of it at either
    cut. What rows lack sums to at least what is left to deal out, so that no row is ever meant to get more than it
    lacks: at alpha = 1 it ends with at most E/R + k * p_max elements, as a static row does. Below that an even share
    of (1 - alpha) comes on top even for full rows: at most (1 - alpha) * E/R in all.

    Attributes:
        alpha: 0 balances each bucket by itself; 1 balances rows over all buckets.
        bucket: a bucket closes when it has at least so many elements.
    """

    alpha: float = 1.0
    bucket: int = BUCKET

    name: ClassVar[str] = "alpha"

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise CanzonaError(f"alpha={self.alpha} is not between 0 and 1", hint="1 balances most")
        StaticStart(self.bucket)  # refuses invalid buckets

    def __call__(self, jobs: Sequence[Job], rows: int, columns: int, load: LoadByRank) -> list[GridPosition]:
        static = rows_of(StaticStart(self.bucket).shards(jobs, rows))
        balanced = rows_of(self.shards(jobs, rows))
        taken = min(static, balanced, key=lambda plan: busiest_row(jobs, plan, rows, load))  # on a tie, the first one
        return within_rows(jobs, taken, columns, "elements", load)

    def shards(self, jobs: Sequence[Job], rows: int) -> Shards:
        """The jobs of each bucket that each row would own, before the plan is compared with the static one."""
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
        """The cuts between rows, as positions in `ends`, the boundaries between jobs. There is one more than rows."""
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
        k = overhang(jobs, self.bucket)
        more = 1 - self.alpha if self.alpha and columns > 1 else 0.0
        return capped(density_ratio(jobs) * (2 + more + (k - 1) / columns), rows, columns, load, blind=True)


def nearest(ends: list[int], target: float) -> int:
    """The position of the boundary that is closest to `target`: the earlier of two, and the first of equal ones."""
    above = min(bisect_left(ends, target), len(ends) - 1)
    below = bisect_left(ends, ends[max(0, above - 1)])
    return below if target - ends[below] <= abs(ends[above] - target) else above


def busiest_row(jobs: Sequence[Job], plan: Rows, rows: int, load: LoadByRank) -> float:
    """The cost of the busiest row: that of all its columns together, including the load that they have already."""
    total = row_loads(rows, load)
    for job in sorted(jobs, key=lambda j: j.index):
        total[plan[job.index]] += job.cost
    return max(total)
