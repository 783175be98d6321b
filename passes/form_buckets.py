"""Lay parameters in flat buckets whose shards belong to data-parallel ranks (ZeRO-1)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from canzona_compile.analysis.roofline import once_around
from canzona_compile.ir.bucket import Bucket, BucketSlice, aligned
from canzona_compile.ir.step import Form, Step, Task
from canzona_compile.machine.hardware import Machine, hardware_of

SMALLEST_CUT = 16384  # elements: a cut makes one more tensor to update on every step, more than it evens out


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter on its way into a bucket.

    Attributes:
        elements: of the fragment that each data-parallel rank holds.
        owner: the data-parallel rank that owns it; None if its update is elementwise.
        whole: whether it may not be cut although its update is elementwise.
    """

    name: str
    elements: int
    dtype: torch.dtype
    owner: int | None
    whole: bool


@dataclass(frozen=True, slots=True)
class FormBuckets:
    """Lay all parameters in buckets in the order in which backward completes their gradients.

    That order is taken to be the reverse of registration. A bucket closes as soon as it has `bucket_bytes`. Matrices go
    to the shard of their owner's data-parallel rank. Elementwise parameters fill the shorter shards, and large ones are
    cut for that. Shards that are still unequal are padded, so that a bucket needs one uniform collective, or stay
    unequal: whichever is predicted to be faster. Padding costs memory as well, so there is a limit to it.

    Attributes:
        ranks: the global ranks of one data-parallel group, in order.
        bucket_bytes: a bucket closes when it has at least so many bytes of gradients.
        whole: the names of elementwise parameters that may not be cut.
        rank: the global rank whose fragments count; ranks of one data-parallel group have fragments of equal sizes.
    """

    ranks: tuple[int, ...]
    bucket_bytes: int
    whole: frozenset[str] = frozenset()
    rank: int = 0

    name: ClassVar[str] = "form-buckets"
    requires: ClassVar[Form] = Form.OWNED
    ensures: ClassVar[Form] = Form.OWNED

    def __call__(self, step: Step) -> Step:
        weights = sorted((*step.tasks, *step.elementwise), key=lambda t: -t.index)
        found: list[Bucket] = []
        for own in in_buckets([self._weight(step, task) for task in weights], self.bucket_bytes):
            found.append(self._bucket(len(found), own, step.machine))
        return replace(step, buckets=tuple(found))

    def _weight(self, step: Step, task: Task) -> Weight:
        grid = task.layout.grid
        column = grid.find(self.rank)[1] if self.rank in grid.members() else 0
        owner = None if task.owner is None else task.owner[0] * len(self.ranks) // grid.replicas
        dtype = step.placed_of(task).template.dtype
        return Weight(task.name, task.layout.boxes[column].numel, dtype, owner, task.name in self.whole)

    def _bucket(self, index: int, weights: Sequence[Weight], machine: Machine) -> Bucket:
        candidates: list[Bucket] = []
        for spread in (True, False):
            slices = sorted(fill(weights, len(self.ranks), spread), key=lambda part: (part.owner, part.offset))
            lengths = [0] * len(self.ranks)
            for part in slices:
                lengths[part.owner] = aligned(part.offset + part.length)
            uneven = Bucket(index, weights[0].dtype, tuple(slices), tuple(lengths), uniform=False, ranks=self.ranks)
            if uneven.may_be_uniform:
                candidates.append(replace(uneven, uniform=True))
            candidates.append(uneven)
        return min(candidates, key=lambda b: seconds(b, machine))  # of equal ones the first: uniform, level


def in_buckets(weights: Iterable[Weight], bucket_bytes: int) -> Iterator[list[Weight]]:
    """Deal weights to buckets in order, those of each dtype to buckets of their own.

    Yields:
        The weights of each bucket. A bucket is ready as soon as its last weight is, so buckets are in the order of
        their last weights.
    """
    filling: dict[torch.dtype, list[Weight]] = {}
    for weight in weights:
        own = filling.setdefault(weight.dtype, [])
        own.append(weight)
        if sum(w.elements for w in own) * weight.dtype.itemsize >= bucket_bytes:
            yield filling.pop(weight.dtype)
    yield from filling.values()


def fill(weights: Sequence[Weight], owners: int, spread: bool = True) -> Iterator[BucketSlice]:
    """Place the weights of one bucket in its shards.

    Matrices come first, then elementwise parameters that are not cut, the largest into the shortest shard. What may be
    cut is poured in last, so that it levels the shards.

    Args:
        spread: whether parameters that are not cut may go to an empty shard. Otherwise they join shards that hold
            something already, if there are any: a norm is not worth a collective of its own.
    """
    length = [0] * owners

    def put(weight: Weight, start: int, elements: int, owner: int) -> BucketSlice:
        part = BucketSlice(weight.name, start, elements, owner, length[owner])
        length[owner] = aligned(length[owner] + elements)
        return part

    for weight in weights:
        if weight.owner is not None:
            yield put(weight, 0, weight.elements, weight.owner)
    grains = [w for w in weights if w.owner is None and (w.whole or w.elements < SMALLEST_CUT)]
    sand = [w for w in weights if w.owner is None and not (w.whole or w.elements < SMALLEST_CUT)]
    for weight in sorted(grains, key=lambda w: -w.elements):
        taken = [] if spread else [r for r in range(owners) if length[r]]
        yield put(weight, 0, weight.elements, min(taken or range(owners), key=lambda r: (length[r], r)))
    for number, weight in enumerate(sand):
        rest = sum(w.elements for w in sand[number:])
        start = 0
        for owner, room in enumerate(rooms(length, rest)):
            last = owner == owners - 1
            elements = (
                weight.elements - start
                if last
                else min(aligned(room * weight.elements // rest), weight.elements - start)
            )
            if elements > 0:
                yield put(weight, start, elements, owner)
                start += elements


def rooms(length: Sequence[int], rest: int) -> list[int]:
    """How many of `rest` further elements each shard takes so that all of them become as level as possible."""
    level, order = 0, sorted(length)
    for count in range(1, len(order) + 1):
        level = (sum(order[:count]) + rest) // count
        if count == len(order) or level <= order[count]:
            break
    return [max(0, level - own) for own in length]


def seconds(bucket: Bucket, machine: Machine) -> float:
    """Predict the seconds of reducing a bucket over its ranks; to gather it takes as long."""
    found = once_around(bucket, hardware_of(machine))
    return found.moved + found.latency
