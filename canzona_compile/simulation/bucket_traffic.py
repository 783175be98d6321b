"""What the two collectives of a bucket ask of a rank: its reduction to owners, and its gathering from them."""

from __future__ import annotations

from collections.abc import Sequence

from canzona_compile.analysis.roofline import Transfer, exchange_seconds, once_around
from canzona_compile.ir.bucket import Bucket
from canzona_compile.machine.hardware import Hardware

# What the smallest collectives of gloo cost, in smallest all-to-alls; CPU times of 2 and of 4 ranks, torch 2.13.
REDUCING, GATHERING = 3, 2


def reduction(bucket: Bucket, hardware: Hardware) -> Transfer:
    """The reduction of a bucket.

    Gloo has no collective that reduces to owners. Torch copies the bucket, sums all of it on every rank, in one
    all-reduce, or in one per shard where shards are uneven, and takes the shard out of it.
    """
    found = once_around(bucket, hardware)
    if hardware.backend != "gloo" or not found.sent:
        return found
    ranks, whole = len(bucket.ranks), size_of(bucket)
    sent = 2 * whole * (ranks - 1) // ranks
    copied, summed = 2 * whole * (1 + 1 / ranks), 3 * whole * (1 - 1 / ranks)
    moved = sent / hardware.link(bucket.ranks).bandwidth + (copied + summed) / hardware.bandwidth
    return Transfer(moved, bucket.collectives * REDUCING * smallest(bucket, hardware), sent)


def gathering(bucket: Bucket, hardware: Hardware) -> Transfer:
    """The gathering of a bucket.

    Gloo gathers equal shards between copies that torch makes of them. Unequal ones go through one all-to-all, to which
    a rank gives its shard once for each rank.
    """
    found = once_around(bucket, hardware)
    if hardware.backend != "gloo" or not found.sent:
        return found
    whole = size_of(bucket)
    copied = 2 * whole * (1 + 1 / len(bucket.ranks)) if bucket.uniform else 2 * whole
    latency = (GATHERING if bucket.uniform else 1) * smallest(bucket, hardware)
    return Transfer(found.moved + copied / hardware.bandwidth, latency, found.sent)


def replica_sum(bucket: Bucket, ranks: Sequence[int], hardware: Hardware) -> Transfer:
    """The sum of a shard over replicas, along a ring; `ranks` hold the same shard."""
    link, length = hardware.link(tuple(ranks)), max(bucket.shard_lengths)
    sent = 2 * length * bucket.dtype.itemsize * (len(ranks) - 1) // len(ranks)
    return Transfer(sent / link.bandwidth, link.latency if len(ranks) > 1 else 0.0, sent)


def smallest(bucket: Bucket, hardware: Hardware) -> float:
    """Seconds of the smallest all-to-all among the ranks of a bucket."""
    return exchange_seconds(hardware.link(bucket.ranks), 0.0, len(bucket.ranks))


def size_of(bucket: Bucket) -> int:
    """The bytes of a bucket, padding included."""
    return bucket.starts[-1] * bucket.dtype.itemsize
