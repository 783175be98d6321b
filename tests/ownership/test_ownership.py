"""Planners of ownership: known cases by hand, and proven bounds against the optimum."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.ownership_table import models, newton_schulz
from canzona_compile.errors import CanzonaError
from canzona_compile.ownership import NAMES, lpt, planner_named
from canzona_compile.ownership import jobs as dealing
from canzona_compile.ownership.alpha import AlphaBalanced, busiest_row, nearest, static_start
from canzona_compile.ownership.buffer import in_buckets, rows_of
from canzona_compile.ownership.jobs import (
    NOTHING,
    GridPosition,
    Job,
    imbalance,
    largest_first,
    loads,
    lower_bound,
    makespan,
    places_of,
    within_rows,
)
from canzona_compile.ownership.lpt import LptSwap, TwoStageLpt
from tests.harness.marks import also
from tests.harness.untimed import untimed

TIGHT = 1 + 1e-12  # sums in another order


@dataclass(frozen=True)
class Instance:
    jobs: list[Job]
    rows: int
    columns: int
    load: Mapping[GridPosition, float]
    bucket: int
    alpha: float

    def planner(self, name: str) -> Any:
        return AlphaBalanced(self.alpha, self.bucket) if name == "alpha" else planner_named(name)

    def plan(self, planner: Any) -> list[GridPosition]:
        return planner(self.jobs, self.rows, self.columns, self.load)

    def makespan(self, owners: Sequence[GridPosition]) -> float:
        return makespan(loads(self.jobs, owners, self.rows, self.columns, self.load))

    def optimum(self) -> float:
        own = [self.load.get(place, 0.0) for place in places_of(self.rows, self.columns)]
        costs = sorted(job.cost for job in self.jobs)
        return least(costs, own, sum(costs) + max(own) + 1)


def least(costs: list[float], own: list[float], known: float) -> float:
    """The least makespan, by trying everything: the costliest job first, of equal places one.

    Args:
        costs: of the jobs, ascending.
        own: the load of each place.
        known: a makespan that is possible, or more.
    """
    if not costs:
        return min(known, max(own))
    for load in set(own):
        if load + costs[-1] < known:
            place = own.index(load)
            known = least(costs[:-1], [*own[:place], load + costs[-1], *own[place + 1 :]], known)
    return known


@st.composite
def instances(draw: st.DrawFn, most: int = 9) -> Instance:
    """Few jobs, some alike and some free, with one to three FLOPs per element or with none of either."""
    rows, columns = draw(st.sampled_from([(r, s) for r in range(1, 4) for s in range(1, 4) if r * s <= 6]))
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
    optimum = case.optimum()
    assert lower_bound(case.jobs, case.rows, case.columns, case.load) <= optimum * TIGHT
    for name in NAMES:
        planner = case.planner(name)
        owners = case.plan(planner)
        assert len(owners) == len(case.jobs)
        assert set(owners) <= set(places_of(case.rows, case.columns))
        factor = planner.bound(case.jobs, case.rows, case.columns, case.load)
        assert 1 <= factor <= case.rows * case.columns
        assert optimum <= case.makespan(owners) * TIGHT
        assert case.makespan(owners) <= factor * optimum * TIGHT, name


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
    static = rows_of(static_start(case.jobs, case.rows, case.bucket))
    alpha = {job.index: r for job, (r, _) in zip(case.jobs, case.plan(case.planner("alpha")), strict=True)}
    assert busiest_row(case.jobs, alpha, case.rows, case.load) <= busiest_row(case.jobs, static, case.rows, case.load)
    free = largest_first(case.jobs, {p: case.load.get(p, 0.0) for p in places_of(case.rows, case.columns)}, "cost")
    swapped = case.makespan(case.plan(LptSwap()))
    assert swapped <= case.makespan([free[job.index] for job in case.jobs])
    assert swapped <= case.makespan(case.plan(TwoStageLpt()))


@pytest.mark.parametrize("name", NAMES)
def test_nothing_to_own(name: str) -> None:
    planner = planner_named(name)
    assert planner([], 2, 2, {(0, 1): 3.0}) == []
    assert 1 <= planner.bound([], 2, 2) <= 4
    assert planner([Job("only", 7, 1.0, 1)], 1, 1, {}) == [(0, 0)]


def test_names() -> None:
    assert [planner_named(name).name for name in NAMES] == [*NAMES]
    assert planner_named("alpha", alpha=0.5) == AlphaBalanced(0.5)
    with pytest.raises(CanzonaError, match=r"(?s)no ownership planner 'best'.*one of alpha, lpt, lpt-swap"):
        planner_named("best")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"alpha": 1.5}, "alpha=1.5 is not between 0 and 1"),
        ({"alpha": math.nan}, "alpha=nan"),
        ({"bucket": 0}, "bucket=0"),
        ({"bucket": -1}, "bucket=-1"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(CanzonaError, match=problem):
        AlphaBalanced(**options)


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
    assert names(static_start(jobs, 2, 10)) == [[[2, 5], [3]], [[4, 1], [5]]]
    assert names(static_start(jobs, 2, 11)) == [[[2, 5], [3, 4]], [[1, 5], []]], "14 elements, then 6"


def test_static_rule_and_empty_fragments() -> None:
    assert names(static_start(buffer(4, 0, 4, 0), 2, 10)) == [[[4], [0, 4, 0]]]
    assert names(static_start(buffer(0, 0), 2, 10)) == [[[0, 0], []]]


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
        assert [r for _, r in sorted(rows_of(static_start(jobs, 2)).items(), reverse=True)] == static
        assert rows(AlphaBalanced(1.0)(jobs, 2, 1, load)) == taken, (costs, load)


def test_largest_first() -> None:
    jobs = buffer(1, 1, 1, 1, costs=(3, 3, 2, 2))
    assert rows(TwoStageLpt()(jobs, 2, 1, {})) == [1, 0, 1, 0], "of equals the one registered first"
    assert TwoStageLpt()(jobs, 2, 1, {(0, 0): 5.0}) == [(1, 0)] * 3 + [(0, 0)]
    assert LptSwap()(buffer(4, 3, 2), 2, 2, {(0, 0): 9.0}) == [(1, 0), (0, 1), (1, 1)], "replicas before columns"


def test_swaps_relieve_the_busiest() -> None:
    """Graham's worst case for two: 3 3 2 2 2 is 7 and 5 largest first, 6 and 6 after one swap."""
    jobs = buffer(3, 3, 2, 2, 2)
    own = loads(jobs, TwoStageLpt()(jobs, 2, 1, {}), 2, 1)
    assert sorted(own.values()) == [5, 7]
    assert sorted(loads(jobs, LptSwap()(jobs, 2, 1, {}), 2, 1).values()) == [6, 6]
    assert makespan(own) == pytest.approx(TwoStageLpt().bound(jobs, 2, 1) * 6), "and the bound is tight"


def decoder(model: str) -> list[Job]:
    """Every matrix of a model as it is optimized once fused ones are split."""
    config = models()[model]
    hidden, q, kv = config["hidden_size"], *(config[f"num_{k}_heads"] * 128 for k in ("attention", "key_value"))
    inner = config["intermediate_size"]
    block = [(inner, hidden), (inner, hidden), (hidden, inner)]
    layer = [(q, hidden), (kv, hidden), (kv, hidden), (hidden, q), *block]
    return [Job(f"m{i}", i, newton_schulz(*s), s[0] * s[1]) for i, s in enumerate(layer * config["num_hidden_layers"])]


def test_split_qwen_on_256_ranks() -> None:
    jobs = decoder("qwen3-32b")
    assert len(jobs) == 448
    assert imbalance(loads(jobs, LptSwap()(jobs, 32, 8, {}), 32, 8)) <= 1.10


@pytest.mark.full
def test_median_gaps() -> None:
    """How far from the optimum rules without a guarantee of it are, on 60 instances of 6 to 12 jobs."""
    dice = random.Random(20_260_801)
    gaps: dict[str, list[float]] = {"lpt": [], "lpt-swap": []}
    for _ in range(60):
        jobs = [Job(f"m{i}", i, dice.uniform(1, 10), 1) for i in range(dice.randint(6, 12))]
        grid = dice.choice([(2, 1), (3, 1), (2, 2)])
        optimum = Instance(jobs, *grid, {}, 1, 1.0).optimum()
        for name, own in gaps.items():
            found = makespan(loads(jobs, planner_named(name)(jobs, *grid, {}), *grid))
            own.append(found / optimum - 1)
    medians = {name: median(own) for name, own in gaps.items()}
    print("median gaps to the optimum:", {name: f"{own:.2%}" for name, own in medians.items()})
    assert medians["lpt"] <= 0.02
    assert medians["lpt-swap"] <= 0.002


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
    dealt = counted(monkeypatch, dealing, "heapreplace")
    looked = counted(monkeypatch, lpt.SwapSearch, "_idlest")
    swapped = counted(monkeypatch, lpt.SwapSearch, "_do")
    owners = LptSwap()(jobs, 512, 8, {})
    assert len(dealt) == 3 * len(jobs), "all places at once, then rows, then columns"
    assert len(swapped) <= 2 * lpt.ROUNDS
    assert len(looked) <= 2 * (lpt.PAIRS + lpt.ROUNDS)
    assert imbalance(loads(jobs, owners, 512, 8)) < 1.02
