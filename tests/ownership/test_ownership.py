"""Planners of ownership: known cases by hand, and proven bounds against the optimum."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from statistics import median
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.ownership_table import models, newton_schulz, worst_shard
from canzona_compile.errors import CanzonaError
from canzona_compile.ownership import NAMES, greedy, local_search, milp, planner_named
from canzona_compile.ownership.alpha import AlphaBalanced, busiest_row, nearest
from canzona_compile.ownership.buffer import in_buckets
from canzona_compile.ownership.exact import OptimalityBound, solve
from canzona_compile.ownership.greedy import largest_first, within_rows
from canzona_compile.ownership.jobs import (
    NOTHING,
    GridPosition,
    Job,
    imbalance,
    loads,
    lower_bound,
    makespan,
    places_of,
)
from canzona_compile.ownership.lpt import Joint, TwoStageLpt
from canzona_compile.ownership.permuted import Permuted
from canzona_compile.ownership.static import StaticStart
from tests.harness.marks import also
from tests.harness.untimed import untimed

TIGHT = 1 + 1e-6  # the solver's tolerance


@dataclass(frozen=True)
class Instance:
    jobs: list[Job]
    rows: int
    columns: int
    load: Mapping[GridPosition, float]
    bucket: int
    alpha: float

    def planner(self, name: str) -> Any:
        return planner_named(name, alpha=self.alpha, bucket=self.bucket, seconds=10)

    def plan(self, planner: Any) -> list[GridPosition]:
        return planner(self.jobs, self.rows, self.columns, self.load)

    def makespan(self, owners: Sequence[GridPosition]) -> float:
        return makespan(loads(self.jobs, owners, self.rows, self.columns, self.load))

    def solve(self) -> tuple[list[GridPosition], OptimalityBound]:
        return solve(self.jobs, self.rows, self.columns, self.load, seconds=10)


@st.composite
def instances(draw: st.DrawFn, most: int = 9, places: int = 6) -> Instance:
    """Few jobs, some alike and some free, with one to three FLOPs per element or with none of either."""
    rows, columns = draw(st.sampled_from([(r, s) for r in range(1, 4) for s in range(1, 4) if r * s <= places]))
    sizes = draw(st.lists(st.integers(0, 40), min_size=1, max_size=most))
    densities = draw(st.lists(st.sampled_from([1.0, 1.0, 2.0, 3.0]), min_size=len(sizes), max_size=len(sizes)))
    jobs = [Job(f"m{i}", i, n * d, n) for i, (n, d) in enumerate(zip(sizes, densities, strict=True))]
    loaded = draw(st.dictionaries(st.sampled_from(places_of(rows, columns)), st.integers(0, 60).map(float)))
    load = loaded if draw(st.booleans()) else {}
    bucket = draw(st.sampled_from([1, 20, 60, 1000]))
    return Instance(jobs, rows, columns, load, bucket, draw(st.sampled_from([0.0, 0.3, 1.0])))


def buffer(*elements: int, costs: Sequence[float] = ()) -> list[Job]:
    """Jobs whose fragments follow one another in the buffer: the last one registered comes first."""
    last = len(elements) - 1
    return [
        Job(f"m{last - i}", last - i, float(c), n)
        for i, (n, c) in enumerate(zip(elements, costs or elements, strict=True))
    ]


def names(shards: list[list[list[Job]]]) -> list[list[list[int]]]:
    return [[[job.elements for job in shard] for shard in bucket] for bucket in shards]


def rows(owners: Sequence[GridPosition]) -> list[int]:
    return [r for r, _ in owners]


# -- any planner -------------------------------------------------------------------------------


@untimed(200)
@given(instances())
def test_every_planner_keeps_its_bound(case: Instance) -> None:
    best, optimum = case.solve()
    assert optimum.proven
    assert case.makespan(best) == optimum.optimum_or_best
    for name in NAMES:
        planner = case.planner(name)
        owners = case.plan(planner)
        assert len(owners) == len(case.jobs)
        assert set(owners) <= set(places_of(case.rows, case.columns))
        factor = planner.bound(case.jobs, case.rows, case.columns, case.load)
        assert 1 <= factor <= case.rows * case.columns
        assert optimum.lower <= case.makespan(owners) * TIGHT
        assert case.makespan(owners) <= factor * optimum.optimum_or_best * TIGHT, name


@pytest.mark.full
@untimed(100)
@given(instances(most=12), st.randoms(use_true_random=False))
def test_no_planner_minds_the_order_of_its_arguments(case: Instance, dice: random.Random) -> None:
    shuffled = replace(
        case, jobs=dice.sample(case.jobs, len(case.jobs)), load=dict(dice.sample([*case.load.items()], len(case.load)))
    )
    for name in NAMES:
        planner = case.planner(name)
        first, second = (dict(zip((j.name for j in c.jobs), c.plan(planner), strict=True)) for c in (case, shuffled))
        assert first == second, name


@pytest.mark.full
@untimed(200)
@given(instances(most=12))
def test_who_is_never_worse_than_whom(case: Instance) -> None:
    static, alpha = (rows_of_plan(case, name) for name in ("static", "alpha"))
    assert busiest_row(case.jobs, alpha, case.rows, case.load) <= busiest_row(case.jobs, static, case.rows, case.load)
    free = largest_first(case.jobs, {p: case.load.get(p, 0.0) for p in places_of(case.rows, case.columns)}, "cost")
    joint = case.makespan(case.plan(Joint()))
    assert joint <= case.makespan([free[job.index] for job in case.jobs])
    assert joint <= case.makespan(case.plan(TwoStageLpt()))
    assert case.makespan(case.plan(case.planner("exact"))) <= joint


def rows_of_plan(case: Instance, name: str) -> dict[int, int]:
    return {job.index: r for job, (r, _) in zip(case.jobs, case.plan(case.planner(name)), strict=True)}


@pytest.mark.parametrize("name", NAMES)
def test_nothing_to_own(name: str) -> None:
    planner = planner_named(name)
    assert planner([], 2, 2, {(0, 1): 3.0}) == []
    assert 1 <= planner.bound([], 2, 2) <= 4
    assert planner([Job("only", 7, 1.0, 1)], 1, 1, {}) == [(0, 0)]


def test_names() -> None:
    assert [planner_named(name).name for name in NAMES] == [*NAMES]
    assert planner_named("alpha", alpha=0.5, bucket=3) == AlphaBalanced(0.5, 3)
    with pytest.raises(CanzonaError, match=r"(?s)no ownership planner 'best'.*one of static, alpha, lpt"):
        planner_named("best")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"name": "alpha", "alpha": 1.5}, "alpha=1.5 is not between 0 and 1"),
        ({"name": "alpha", "alpha": math.nan}, "alpha=nan"),
        ({"name": "alpha", "bucket": 0}, "bucket=0"),
        ({"name": "static", "bucket": -1}, "bucket=-1"),
        ({"name": "permuted", "bucket": 0}, "bucket=0"),
        ({"name": "exact", "seconds": 0.0}, "seconds=0.0 is not positive"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(CanzonaError, match=problem):
        planner_named(**options)


def test_loads_and_imbalance() -> None:
    own = loads(buffer(2, 3), [(0, 1), (0, 1)], 1, 2, {(0, 0): 1.0})
    assert own == {(0, 0): 1.0, (0, 1): 5.0}
    assert makespan(own) == 5
    assert imbalance(own) == 5 / 3
    assert imbalance({(0, 0): 0.0}) == 1


# -- rules, by hand ----------------------------------------------------------------------------


def test_static_rule() -> None:
    """Two buckets of ten elements: the second job of each begins before the middle, the third one after it."""
    jobs = buffer(2, 5, 3, 4, 1, 5)
    assert [[job.index for job in bucket] for bucket in in_buckets(jobs, 10)] == [[5, 4, 3], [2, 1, 0]]
    static = StaticStart(10)
    assert names(static.shards(jobs, 2)) == [[[2, 5], [3]], [[4, 1], [5]]]
    assert rows(static(jobs, 2, 1, {})) == [0, 0, 1, 0, 0, 1]
    assert names(StaticStart(11).shards(jobs, 2)) == [[[2, 5], [3, 4]], [[1, 5], []]], "14 elements, then 6"


def test_static_rule_and_empty_fragments() -> None:
    assert names(StaticStart(10).shards(buffer(4, 0, 4, 0), 2)) == [[[4], [0, 4, 0]]]
    assert names(StaticStart(10).shards(buffer(0, 0), 2)) == [[[0, 0], []]]


def test_columns_share_a_row() -> None:
    """By elements the two largest part; by cost, the dear one stays alone, with the load counted."""
    jobs = buffer(5, 4, 3, costs=(1, 2, 9))
    owned = dict.fromkeys(range(3), 0)
    assert within_rows(jobs, owned, 2, "elements", {(0, 0): 99.0}) == [(0, 0), (0, 1), (0, 1)]
    assert within_rows(jobs, owned, 2, "cost", NOTHING) == [(0, 1), (0, 1), (0, 0)]
    assert within_rows(jobs, owned, 2, "cost", {(0, 0): 99.0}) == [(0, 1)] * 3


def test_cuts_snap_to_the_nearest_boundary() -> None:
    ends = [0, 4, 7, 7, 12]
    assert [nearest(ends, t) for t in (0, 1.9, 2, 2.1, 5.4, 5.5, 5.6, 7, 9.5, 9.6, 12, 12.1)] == [
        *(0, 0, 0, 1, 1, 1, 2, 2, 2, 4, 4, 4)
    ]
    assert names(AlphaBalanced(0.0).shards(buffer(4, 3, 5), 2)) == [[[4, 3], [5]]], "6 is nearer to 7 than to 4"
    assert names(AlphaBalanced(0.0).shards(buffer(2, 2, 2), 2)) == [[[2], [2, 2]]], "of 2 and 4, as near, the earlier"


def test_later_buckets_fill_up_what_earlier_ones_left() -> None:
    jobs = buffer(6, 3, 3)
    assert names(AlphaBalanced(1.0, 6).shards(jobs, 2)) == [[[], [6]], [[3, 3], []]]
    assert names(AlphaBalanced(0.0, 6).shards(jobs, 2)) == [[[], [6]], [[3], [3]]]
    # Half of 3 and half of 6 is 4.5, as near to 3 as to 6; a little more is not.
    assert names(AlphaBalanced(0.5, 6).shards(jobs, 2)) == [[[], [6]], [[3], [3]]]
    assert names(AlphaBalanced(0.6, 6).shards(jobs, 2)) == [[[], [6]], [[3, 3], []]]
    longer = buffer(3, 3, 8)
    assert names(AlphaBalanced(1.0, 6).shards(longer, 2)) == [[[3, 3], []], [[], [8]]], "the longest bucket is first"


def test_balanced_only_if_it_costs_less() -> None:
    static, balanced = [0, 0, 1], [0, 1, 1]
    for costs, load, taken in (
        ((2, 2, 2), {}, static),  # no better
        ((2, 2, 1), {}, balanced),
        ((1, 2, 2), {}, static),
        ((2, 2, 1), {(1, 0): 1.0}, static),  # 4 and 2, or 2 and 4
        ((2, 2, 2), {(0, 0): 0.5}, balanced),
    ):
        jobs = buffer(2, 2, 2, costs=costs)
        assert rows(StaticStart()(jobs, 2, 1, load)) == static
        assert rows(AlphaBalanced(1.0)(jobs, 2, 1, load)) == taken, (costs, load)


def test_largest_first() -> None:
    jobs = buffer(1, 1, 1, 1, costs=(3, 3, 2, 2))
    assert rows(TwoStageLpt()(jobs, 2, 1, {})) == [1, 0, 1, 0], "of equals the one registered first"
    assert TwoStageLpt()(jobs, 2, 1, {(0, 0): 5.0}) == [(1, 0)] * 3 + [(0, 0)]
    assert Joint()(buffer(4, 3, 2), 2, 2, {(0, 0): 9.0}) == [(1, 0), (0, 1), (1, 1)], "replicas before columns"


def test_swaps_relieve_the_busiest() -> None:
    """Graham's worst case for two: 3 3 2 2 2 is 7 and 5 largest first, 6 and 6 after one swap."""
    jobs = buffer(3, 3, 2, 2, 2)
    own = loads(jobs, TwoStageLpt()(jobs, 2, 1, {}), 2, 1)
    assert sorted(own.values()) == [5, 7]
    assert sorted(loads(jobs, Joint()(jobs, 2, 1, {}), 2, 1).values()) == [6, 6]
    assert makespan(own) == pytest.approx(TwoStageLpt().bound(jobs, 2, 1) * 6), "and the bound is tight"


def test_permuted() -> None:
    """First 5 and 3, then 2 to the shorter shard and 2 to the cheaper of two as long; the next bucket likewise."""
    jobs = buffer(3, 2, 5, 2, 4, costs=(3, 2, 9, 2, 4))
    planner = Permuted(12)
    shards = planner.shards(jobs, 2)
    assert names(shards) == [[[5], [3, 2, 2]], [[], [4]]]
    assert [job.index for bucket in shards for shard in bucket for job in shard] == [2, 4, 3, 1, 0]
    assert worst_shard(shards) == 2
    assert names(planner.shards(jobs, 2, {(1, 1): 100.0})) == [[[2, 5], [3, 2]], [[4], []]]
    assert worst_shard([]) == 1


# -- the optimum -------------------------------------------------------------------------------


@pytest.mark.full
@untimed(100)
@given(instances(most=6, places=4))
def test_optimum_is_that_of_trying_everything(case: Instance) -> None:
    everything = product(places_of(case.rows, case.columns), repeat=len(case.jobs))
    least = min(case.makespan(owners) for owners in everything)
    assert case.solve()[1].optimum_or_best == pytest.approx(least, rel=1e-6)
    assert lower_bound(case.jobs, case.rows, case.columns, case.load) <= least * (1 + 1e-12)


def test_what_is_known_when_time_is_up() -> None:
    dice = random.Random(4)
    jobs = [Job(f"m{i}", i, dice.uniform(1, 10), 1) for i in range(40)]
    for count in (12, 40):  # few patterns, and too many
        owners, bound = solve(jobs[:count], 5, 1, seconds=1e-9)
        assert owners == Joint()(jobs[:count], 5, 1, {})
        assert bound.optimum_or_best == makespan(loads(jobs[:count], owners, 5, 1))
        assert bound.lower == lower_bound(jobs[:count], 5, 1)
        assert bound.gap == bound.optimum_or_best / bound.lower - 1 > 0
        assert not bound.proven


def decoder(model: str) -> list[Job]:
    """Every matrix of a model as it is optimized once fused ones are split."""
    config = models()[model]
    hidden, q, kv = config["hidden"], config["heads"] * 128, config["kv_heads"] * 128
    inner = config["intermediate"]
    block = [(inner, hidden), (inner, hidden), (hidden, inner)] * config.get("experts", 1)
    layer = [(q, hidden), (kv, hidden), (kv, hidden), (hidden, q), *block]
    return [Job(f"m{i}", i, newton_schulz(*s), s[0] * s[1]) for i, s in enumerate(layer * config["layers"])]


def test_split_qwen_on_256_ranks() -> None:
    jobs = decoder("qwen3-32b")
    assert len(jobs) == 448
    owners, bound = solve(jobs, 32, 8, seconds=10)
    assert bound.proven
    assert imbalance(loads(jobs, owners, 32, 8)) <= 1.10


@pytest.mark.parametrize(("model", "ranks"), [("qwen3-4b", 16), ("qwen3-4b", 64), ("qwen3-14b", 16)])
def test_split_qwen_where_largest_first_is_not_best(model: str, ranks: int) -> None:
    assert solve(decoder(model), ranks, 1, seconds=10)[1].proven


@pytest.mark.full
def test_median_gaps() -> None:
    """How far from the optimum rules without a guarantee of it are, on 60 instances of 6 to 12 jobs."""
    dice = random.Random(20_260_801)
    gaps: dict[str, list[float]] = {"lpt": [], "joint": []}
    for _ in range(60):
        jobs = [Job(f"m{i}", i, dice.uniform(1, 10), 1) for i in range(dice.randint(6, 12))]
        grid = dice.choice([(2, 1), (3, 1), (2, 2)])
        optimum = solve(jobs, *grid, seconds=10)[1]
        assert optimum.proven
        for name, own in gaps.items():
            found = makespan(loads(jobs, planner_named(name)(jobs, *grid, {}), *grid))
            own.append(found / optimum.optimum_or_best - 1)
    medians = {name: median(own) for name, own in gaps.items()}
    print("median gaps to the optimum:", {name: f"{own:.2%}" for name, own in medians.items()})
    assert medians["lpt"] <= 0.02
    assert medians["joint"] <= 0.002


# -- scale, in counts and not in seconds -------------------------------------------------------


def counted(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[None]:
    """Grows by one with every call."""
    calls: list[None] = []
    original = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, call)
    return calls


@pytest.mark.parametrize("distinct", [*also([False]), True])
def test_work_of_36000_jobs_on_4096_places(monkeypatch: pytest.MonkeyPatch, distinct: bool) -> None:
    dice = random.Random(5)
    costs = [dice.uniform(1, 10) for _ in range(36_000 if distinct else 12)]
    jobs = [Job(f"m{i}", i, costs[i % len(costs)], 10**6) for i in range(36_000)]
    dealt = counted(monkeypatch, greedy, "heapreplace")
    looked = counted(monkeypatch, local_search.SwapSearch, "_idlest")
    swapped = counted(monkeypatch, local_search.SwapSearch, "_do")
    owners = Joint()(jobs, 512, 8, {})
    assert len(dealt) == 3 * len(jobs), "all places at once, then rows, then columns"
    assert len(swapped) <= 2 * local_search.ROUNDS
    assert len(looked) <= 2 * (local_search.PAIRS + local_search.ROUNDS)
    assert imbalance(loads(jobs, owners, 512, 8)) < 1.02


@pytest.mark.full
def test_programs_for_36000_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices of a kind are counted, not listed: a mixture of experts on 256 ranks takes a few small programs."""
    solved = counted(monkeypatch, milp.Patterns, "within")
    jobs = decoder("qwen3-235b-a22b")
    assert len(jobs) == 36_472
    owners, bound = solve(jobs, 32, 8)
    assert bound.proven
    assert 1 <= len(solved) <= 10
    assert imbalance(loads(jobs, owners, 32, 8)) < 1.005
