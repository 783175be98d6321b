"""Buckets of ZeRO-1: flat buffers of gradients that one collective reduces and of parameters that one gathers.

A bucket has one *shard* per data-parallel rank. A matrix lies whole in the shard of its owner rank. A parameter whose
update is elementwise may be cut anywhere, so its slices fill the shards that are short. Canzona (arXiv 2602.06079)
calls the first property atomicity.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from canzona_compile.ir.layout import WHOLE_VECTORS

BUCKET_BYTES = 64 * 2**20  # the size at which a bucket closes, unless the user or the link asks for another one
LEAST_BUCKET_BYTES = 2**22  # below it, what hosts do for each bucket costs more than waiting for it
MOST_PADDING = 0.03  # of a bucket's elements, which padding may add for the sake of a uniform collective


@dataclass(frozen=True, slots=True)
class BucketSlice:
    """Consecutive elements of one parameter's fragment, and the place where a bucket holds them.

    Attributes:
        name: the name of the parameter, or of the piece of a fused parameter.
        start: the first element, in the flattened fragment.
        length: the number of elements; the whole fragment unless the parameter is cut. None of a piece of which this
            rank holds no row: its owner still computes it, with the ranks that hold the rows.
        owner: the data-parallel rank that updates them, counted within the data-parallel mesh dim.
        offset: the position of the first element in the owner's shard.
    """

    name: str
    start: int
    length: int
    owner: int
    offset: int

    @property
    def key(self) -> tuple[str, int]:
        """Which elements it has, wherever a bucket holds them."""
        return self.name, self.start

    @property
    def stop(self) -> int:
        """The element after the last one, in the flattened fragment."""
        return self.start + self.length


@dataclass(frozen=True)
class Bucket:
    """One bucket.

    Attributes:
        index: its position; the gradients of bucket 0 are complete first.
        dtype: the dtype of its parameters and gradients.
        slices: what it holds, by owner and offset.
        lengths: the length of each shard in elements, without padding; a multiple of WHOLE_VECTORS.
        uniform: whether all shards are padded to the longest one, for collectives of equal shards.
        ranks: the global rank of each owner, in one of the data-parallel groups; empty if unknown.
    """

    index: int
    dtype: torch.dtype
    slices: tuple[BucketSlice, ...]
    lengths: tuple[int, ...]
    uniform: bool
    ranks: tuple[int, ...] = ()

    @cached_property
    def shard_lengths(self) -> tuple[int, ...]:
        """The length of each shard in elements, with padding."""
        return (max(self.lengths),) * len(self.lengths) if self.uniform else self.lengths

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The position of each shard in the bucket, and last the length of the bucket."""
        found = [0]
        for length in self.shard_lengths:
            found.append(found[-1] + length)
        return tuple(found)

    @cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """The positions (start, stop) in the bucket that hold no element: padding, and what alignment leaves."""
        found, reached = [], 0
        for part in self.slices:
            start = self.starts[part.owner] + part.offset
            if start > reached:
                found.append((reached, start))
            reached = start + part.length
        if self.starts[-1] > reached:
            found.append((reached, self.starts[-1]))
        return tuple(found)

    @property
    def elements(self) -> int:
        """The number of elements, without padding and alignment."""
        return sum(part.length for part in self.slices)

    @property
    def may_be_uniform(self) -> bool:
        """Whether the padding that equal shards need is within its limit."""
        padded = max(self.lengths, default=0) * len(self.lengths)
        return padded - sum(self.lengths) <= MOST_PADDING * self.elements

    def of(self, slices: Iterable[BucketSlice]) -> Bucket:
        """A bucket of some of its slices, without gaps between them. They stay with their owners."""
        lengths = [0] * len(self.lengths)
        packed = []
        for part in slices:
            packed.append(replace(part, offset=lengths[part.owner]))
            lengths[part.owner] = aligned(lengths[part.owner] + part.length)
        found = replace(self, slices=tuple(packed), lengths=tuple(lengths), uniform=False)
        return replace(found, uniform=found.may_be_uniform)

    @property
    def padding(self) -> int:
        """The number of elements that padding and alignment add."""
        return self.starts[-1] - self.elements

    @property
    def collectives(self) -> int:
        """The number of collectives that reduce it, and as many gather it: an uneven one needs one per shard."""
        return 1 if self.uniform else sum(length > 0 for length in self.lengths)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of its parameters, each once."""
        return tuple(dict.fromkeys(part.name for part in self.slices))

    @cached_property
    def by_owner(self) -> tuple[tuple[BucketSlice, ...], ...]:
        """The slices of each owner."""
        return tuple(tuple(p for p in self.slices if p.owner == owner) for owner in range(len(self.lengths)))


def bytes_by_link(total: int, bandwidth: float, latency: float) -> int:
    """The size at which buckets close, so that reducing and gathering take the least time.

    The first bucket waits until its gradients are there, and the last one is waited for: the fewer bytes the better.
    But each bucket costs the latency of a collective. The sum, total / size * latency + size / bandwidth, is least at
    the geometric mean of all bytes and of those that a link carries during its latency. The nearest power of two is
    taken, so that runs on the same machines have the same buckets.

    Args:
        total: bytes of all gradients of a rank.
        bandwidth: bytes per second that a rank sends.
        latency: seconds of the smallest collective.
    """
    best = math.sqrt(total * bandwidth * latency)
    return min(BUCKET_BYTES, max(LEAST_BUCKET_BYTES, 1 << round(math.log2(best))))


def aligned(elements: int) -> int:
    """Round up to a multiple of WHOLE_VECTORS: where slices begin."""
    return -(-elements // WHOLE_VECTORS) * WHOLE_VECTORS
