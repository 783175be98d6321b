"""FormBuckets: every element once, matrices whole on their owners, shards as level as elementwise parameters allow."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

from canzona_compile.errors import InvalidStep
from canzona_compile.ir.bucket import (
    BUCKET_BYTES,
    LEAST_BUCKET_BYTES,
    MOST_PADDING,
    Bucket,
    BucketSlice,
    aligned,
    bytes_by_link,
)
from canzona_compile.ir.layout import WHOLE_VECTORS
from canzona_compile.ir.options import Options
from canzona_compile.ir.pipeline import run
from canzona_compile.ir.printer import show
from canzona_compile.ir.step import Step
from canzona_compile.ir.verifier import verify
from canzona_compile.machine.hardware import Machine, named_hardware
from canzona_compile.passes import FormBuckets, planning_passes, zero1_passes
from canzona_compile.passes.form_buckets import SMALLEST_CUT, Weight, fill, in_buckets, seconds
from tests.harness.marks import first
from tests.harness.samples import grid_of, muon_step
from tests.harness.untimed import untimed

CUDA = Machine("cuda", "nccl", 1)
F32, BF16 = torch.float32, torch.bfloat16
OWNERS = Options(strategy="owner")
RANKS = (0, 8, 16, 24)


@some.composite
def mixtures(draw: some.DrawFn) -> tuple[list[Weight], int]:
    """Weights of all kinds, and a number of owners."""
    owners = draw(some.integers(1, 9))
    count = draw(some.integers(1, 12))
    weights = []
    for i in range(count):
        matrix = draw(some.booleans())
        size = draw(some.one_of(some.integers(1, 300), some.integers(SMALLEST_CUT - 2, 40 * SMALLEST_CUT)))
        owner = draw(some.integers(0, owners - 1)) if matrix else None
        weights.append(Weight(f"w{i}", size, F32, owner, not matrix and draw(some.booleans())))
    return weights, owners


def shards(slices: list[BucketSlice], owners: int) -> list[int]:
    """The length of each shard."""
    found = [0] * owners
    for part in slices:
        found[part.owner] = max(found[part.owner], aligned(part.offset + part.length))
    return found


@given(mixtures(), some.booleans())
@untimed(200)
def test_every_element_lies_in_one_place(case: tuple[list[Weight], int], spread: bool) -> None:
    weights, owners = case
    slices = list(fill(weights, owners, spread))
    for weight in weights:
        own = sorted((p for p in slices if p.name == weight.name), key=lambda p: p.start)
        assert [p.start for p in own] == [0, *(p.stop for p in own[:-1])]
        assert own[-1].stop == weight.elements
        assert len(own) == 1 or not (weight.whole or weight.owner is not None or weight.elements < SMALLEST_CUT)
        assert weight.owner in (None, own[0].owner)
    for owner in range(owners):
        reached = 0
        for part in (p for p in slices if p.owner == owner):
            assert part.length > 0
            assert part.offset % WHOLE_VECTORS == 0
            assert part.offset >= reached
            reached = part.offset + part.length


@pytest.mark.full
@given(mixtures())
@untimed(200)
def test_cut_parameters_level_the_shards(case: tuple[list[Weight], int]) -> None:
    """No shard that sand was poured into stands out by more than alignment; no shard lies below those and is left."""
    weights, owners = case
    slices = list(fill(weights, owners))
    cut = {w.name for w in weights if not (w.whole or w.owner is not None or w.elements < SMALLEST_CUT)}
    poured = {p.owner for p in slices if p.name in cut}
    lengths = shards(slices, owners)
    slack = (len(weights) + 1) * owners * WHOLE_VECTORS  # every slice is rounded, and the last shard takes what is left
    if poured:
        assert max(lengths[r] for r in poured) <= min(lengths) + slack
    whole = shards([p for p in slices if p.name not in cut], owners)
    assert max(lengths) <= max(max(whole), -(-sum(w.elements for w in weights) // owners) + slack) + slack


@pytest.mark.full
@given(mixtures(), some.sampled_from([1, 1 << 16, 1 << 20, 1 << 30]))
@untimed(100)
def test_buckets_close_when_they_are_full(case: tuple[list[Weight], int], size: int) -> None:
    weights = [replace(w, dtype=(F32, BF16)[i % 2]) for i, w in enumerate(case[0])]
    found = list(in_buckets(weights, size))
    assert sorted(w.name for own in found for w in own) == sorted(w.name for w in weights)
    order = {w.name: i for i, w in enumerate(weights)}
    for own in found:
        assert len({w.dtype for w in own}) == 1
        assert [order[w.name] for w in own] == sorted(order[w.name] for w in own)
        assert sum(w.elements for w in own[:-1]) * own[0].dtype.itemsize < size


@pytest.mark.full
@given(mixtures())
@untimed(100)
def test_the_choice_between_uniform_and_uneven(case: tuple[list[Weight], int]) -> None:
    weights, owners = case
    former = FormBuckets(tuple(range(owners)), 1 << 40)
    bucket = former._bucket(0, weights, CUDA)
    assert bucket == former._bucket(0, weights, CUDA), "all ranks make the same"
    assert bucket.elements == sum(w.elements for w in weights)
    assert bucket.starts[-1] == sum(bucket.shard_lengths)
    assert bucket.padding == sum(bucket.shard_lengths) - bucket.elements
    assert sum(stop - start for start, stop in bucket.gaps) == bucket.padding
    uneven, even = (replace(bucket, uniform=uniform) for uniform in (False, True))
    assert even.shard_lengths == (max(bucket.lengths),) * owners
    added = even.padding - uneven.padding
    assert added == owners * max(bucket.lengths) - sum(bucket.lengths)
    if bucket.uniform:
        assert added <= MOST_PADDING * bucket.elements
        assert seconds(even, CUDA) <= seconds(uneven, CUDA)
    elif added <= MOST_PADDING * bucket.elements:
        assert seconds(uneven, CUDA) < seconds(even, CUDA)


def test_a_norm_gets_no_collective_of_its_own() -> None:
    """One matrix on one of four ranks and a norm: one reduction of a shard that holds both."""
    weights = [Weight("norm", 4096, F32, None, False), Weight("matrix", 1 << 24, F32, 2, False)]
    found = FormBuckets(RANKS, 1 << 30)._bucket(0, weights, CUDA)
    assert (found.lengths, found.uniform, found.collectives) == ((0, 0, (1 << 24) + 4096, 0), False, 1)
    sand = [replace(weights[0], elements=1 << 26), weights[1]]
    level = FormBuckets(RANKS, 1 << 30)._bucket(0, sand, CUDA)
    assert (set(level.lengths), level.uniform) == ({((1 << 26) + (1 << 24)) // 4}, True), "sand levels the shards"


def test_seconds_by_hand() -> None:
    link = named_hardware("h100").network
    lengths = (640, 0, 128, 64)
    bucket = Bucket(0, F32, (), lengths, uniform=False, ranks=RANKS)
    assert seconds(bucket, CUDA) == pytest.approx(4 * 832 / link.bandwidth + 3 * link.latency)
    assert seconds(replace(bucket, uniform=True), CUDA) == pytest.approx(4 * 3 * 640 / link.bandwidth + link.latency)
    assert seconds(replace(bucket, ranks=(0,), lengths=(640,)), CUDA) == 0.0


# -- in a step ---------------------------------------------------------------------------------------


def step_with(replicas: int, shards: int = 1, bucket_bytes: int = 20_000) -> tuple[Step, Step]:
    """A step of six matrices before and after tasks move to their owners' replicas."""
    grid = grid_of(replicas, shards)
    owned, _ = run(muon_step(grid, *[(64, 32), (32, 64), (96, 32)] * 2), planning_passes(OWNERS))
    ranks = [row[0] for row in grid.ranks]
    _, history = run(owned, zero1_passes(ranks, bucket_bytes, frozenset(), 0))
    return history.records[0].after, history.records[1].after


@pytest.mark.parametrize("grid", [(1, 1), (2, 1), (4, 1), (2, 2)], ids=str)
def test_matrices_lie_on_the_replica_of_their_owner(grid: tuple[int, int]) -> None:
    for step in step_with(*grid):
        verify(step)
        names = [name for bucket in step.buckets for name in bucket.names]
        assert sorted(names) == sorted(t.name for t in step.tasks)
        assert "buckets {" in show(step)


def test_fragments_are_those_of_the_ranks_own_column() -> None:
    owned, _ = run(muon_step(grid_of(2, 2), (33, 32)), planning_passes(OWNERS))
    for column, rows in enumerate((17, 16)):
        (bucket,) = FormBuckets((column, 2 + column), 1 << 30, rank=column)(owned).buckets
        assert bucket.elements == rows * 32


def test_the_order_of_tasks_does_not_count() -> None:
    step, _ = step_with(4)
    tasks = list(step.tasks)
    random.Random(0).shuffle(tasks)
    again, _ = run(replace(step, tasks=tuple(tasks), buckets=()), [FormBuckets((0, 1, 2, 3), 20_000)])
    assert again.buckets == step.buckets


# -- the verifier -------------------------------------------------------------------------------------


def part(**changes: object) -> Callable[[Step], Step]:
    """Change the first slice of the first bucket."""

    def change(step: Step) -> Step:
        first, *others = step.buckets
        made = (replace(first.slices[0], **changes), *first.slices[1:])  # type: ignore[arg-type]
        return replace(step, buckets=(replace(first, slices=made), *others))

    return change


def bucket(**changes: object) -> Callable[[Step], Step]:
    def change(step: Step) -> Step:
        first, *others = step.buckets
        return replace(step, buckets=(replace(first, **changes), *others))  # type: ignore[arg-type]

    return change


def cut(step: Step) -> Step:
    """Cut the first matrix in two, on one owner."""
    first, *others = step.buckets
    whole = first.slices[0]
    half = whole.length // 2
    two = (
        replace(whole, length=half),
        replace(whole, start=half, length=whole.length - half, offset=whole.offset + half),
    )
    return replace(step, buckets=(replace(first, slices=(*two, *first.slices[1:])), *others))


def twice(step: Step) -> Step:
    """Let the last bucket hold what the first one holds."""
    *others, last = step.buckets
    first = step.buckets[0]
    return replace(step, buckets=(*others, replace(first, index=last.index)))


def elsewhere(step: Step) -> Step:
    """Give the shard of each owner to the next one."""
    first, *others = step.buckets
    lengths = (first.lengths[-1], *first.lengths[:-1])
    moved = [replace(p, owner=(p.owner + 1) % len(lengths)) for p in first.slices]
    made = replace(first, slices=tuple(sorted(moved, key=lambda p: (p.owner, p.offset))), lengths=lengths)
    return replace(step, buckets=(made, *others))


@pytest.mark.parametrize("moved", first([False, True]))
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (bucket(index=5), "bucket 0 calls itself 5"),
        (bucket(lengths=(2048, 4097)), "not a multiple of 64"),
        (bucket(lengths=(64, 64)), "it ends after its shard"),
        (bucket(lengths=(1 << 20,) * 3), "3 shards for 2 ranks"),
        (part(owner=7), "owner 7 is not one of 2"),
        (part(owner=-1), "owner -1 is not one of 2"),
        (part(offset=32), "not a multiple of 64"),
        (part(length=0), "buckets hold 0 of its elements"),
        (part(length=-1), "has -1 elements"),
        (part(start=64), "elements 0 to 64 are missing"),
        (part(length=64), "buckets hold 64 of its elements"),
        (part(name="stranger"), "buckets hold 0 of its elements"),
        (lambda step: replace(step, buckets=step.buckets[1:]), "calls itself 1"),
        (lambda step: replace(step, buckets=step.buckets[:-1]), "buckets hold 0"),
        (lambda step: replace(step, tasks=step.tasks[:-1]), "a bucket holds what no task updates"),
        (cut, "it is a matrix, but lies in 2 slices"),
        (twice, "lies in 2 slices"),
        (elsewhere, "not in its owner's replica"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_planted_violations(change: Callable[[Step], Step], message: str, moved: bool) -> None:
    step = step_with(2)[moved]
    verify(step)
    broken = change(step)
    for before in (None, step):
        with pytest.raises(InvalidStep, match=message):
            verify(broken, before)


def test_slices_that_overlap() -> None:
    step = step_with(1, bucket_bytes=1 << 30)[0]
    first = step.buckets[0]
    two = first.slices[1]
    made = (first.slices[0], replace(two, offset=two.offset - 64), *first.slices[2:])
    with pytest.raises(InvalidStep, match="overlaps the slice before it"):
        verify(replace(step, buckets=(replace(first, slices=made),)))


@pytest.mark.parametrize("latency", [1e-5, 1e-3])
@pytest.mark.parametrize("bandwidth", [1e7, 1e9, 1e11])
@pytest.mark.parametrize("total", [10**6, 10**8, 10**10])
def test_buckets_by_link_take_the_least_time(total: int, bandwidth: float, latency: float) -> None:
    """Among the sizes that are allowed."""

    def seconds(size: float) -> float:
        return total / size * latency + size / bandwidth

    best = bytes_by_link(total, bandwidth, latency)
    others = [min(BUCKET_BYTES, max(LEAST_BUCKET_BYTES, best * factor)) for factor in (0.25, 0.5, 0.9, 1.1, 2, 4)]
    assert all(seconds(best) <= seconds(other) * 1.07 for other in others)  # a power of two
