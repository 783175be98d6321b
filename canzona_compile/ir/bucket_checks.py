"""What buckets promise: shards hold every element once, aligned and apart, and matrices whole on their owners."""

from __future__ import annotations

from collections import defaultdict

from canzona_compile.errors import InvalidStep
from canzona_compile.ir.bucket import ALIGNMENT, Bucket, BucketSlice
from canzona_compile.ir.step import Step, Task


def bucketed(step: Step) -> None:
    """Check the buckets of a step, if it has some."""
    if not step.buckets:
        return
    found: dict[str, list[tuple[BucketSlice, Bucket]]] = defaultdict(list)
    for i, bucket in enumerate(step.buckets):
        if bucket.index != i:
            raise InvalidStep(f"bucket {i} calls itself {bucket.index}", at=f"bucket {i}")
        laid_out(bucket)
        for part in bucket.slices:
            found[part.name].append((part, bucket))
    for task in step.tasks:
        owned(task, found.get(task.name, []))
    for task in (*step.tasks, *step.elementwise):
        covered(task, found.pop(task.name, []))
    if found:
        raise InvalidStep("a bucket holds what no task updates", at=next(iter(found)))


def laid_out(bucket: Bucket) -> None:
    """The slices of each shard are in order, aligned, apart from one another and inside of the shard."""
    where = f"bucket {bucket.index}"
    if any(length % ALIGNMENT for length in bucket.lengths):
        raise InvalidStep(f"the length of a shard is not a multiple of {ALIGNMENT}", at=where)
    if bucket.ranks and len(bucket.ranks) != len(bucket.lengths):
        raise InvalidStep(f"it has {len(bucket.lengths)} shards for {len(bucket.ranks)} ranks", at=where)
    reached = [0] * len(bucket.lengths)
    before = -1
    for part in bucket.slices:
        at = f"{part.name} in {where}"
        if not 0 <= part.owner < len(bucket.lengths):
            raise InvalidStep(f"its owner {part.owner} is not one of {len(bucket.lengths)}", at=at)
        if part.owner < before:
            raise InvalidStep("the slices are not in the order of their owners", at=at)
        before = part.owner
        if part.length < 0:
            raise InvalidStep(f"a slice has {part.length} elements", at=at)
        if part.offset % ALIGNMENT:
            raise InvalidStep(f"its offset {part.offset} is not a multiple of {ALIGNMENT}", at=at)
        if part.offset < reached[part.owner]:
            raise InvalidStep("it overlaps the slice before it", at=at)
        reached[part.owner] = part.offset + part.length
        if reached[part.owner] > bucket.lengths[part.owner]:
            raise InvalidStep(f"it ends after its shard of {bucket.lengths[part.owner]} elements", at=at)


def covered(task: Task, found: list[tuple[BucketSlice, Bucket]]) -> None:
    """The slices of a parameter hold each element of a fragment once, in one bucket."""
    if len({bucket.index for _, bucket in found}) > 1:
        raise InvalidStep("it is in several buckets", at=task.name)
    sizes = sorted({box.numel for box in task.layout.boxes})
    if len(found) > 1 and not all(part.length for part, _ in found):
        raise InvalidStep("a slice of it has no elements", at=task.name)
    reached = 0
    for part, _ in sorted(found, key=lambda pair: pair[0].start):
        if part.start != reached:
            problem = "are missing" if part.start > reached else "are in two slices"
            low, high = sorted((part.start, reached))
            raise InvalidStep(f"its elements {low} to {high} {problem}", at=task.name)
        reached = part.stop
    if reached not in sizes:
        raise InvalidStep(f"buckets hold {reached} of its elements, a fragment has {sizes}", at=task.name)


def owned(task: Task, found: list[tuple[BucketSlice, Bucket]]) -> None:
    """A matrix is in one piece, in the shard of the replica that updates it."""
    if task.owner is None:
        raise InvalidStep("it has no owner, so no shard is its own", at=task.name)
    if len(found) > 1:
        raise InvalidStep(f"it is a matrix, but lies in {len(found)} slices", at=task.name)
    for part, bucket in found:
        if not bucket.ranks:
            continue
        grid, rank = task.layout.grid, bucket.ranks[part.owner]
        members = set(grid.members())
        # Before tasks move to the replicas of their owners, each replica has as many rows as the others.
        rows = grid.replicas // len(bucket.ranks) if members.issuperset(bucket.ranks) else grid.replicas
        if rank not in members or grid.find(rank)[0] // rows != task.owner[0] // rows:
            raise InvalidStep(f"it lies in the shard of rank {rank}, which is not in its owner's replica", at=task.name)
