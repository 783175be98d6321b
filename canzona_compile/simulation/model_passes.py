"""Plays the model's own passes around a step under ZeRO-1: backward with reductions, forward with gathers.

All ranks of a data-parallel group compute the same passes at the same time, so only the busiest share of a collective
counts. One rank that has this share stands for all, unless ranks share the processors that move the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from canzona_compile.analysis.roofline import Transfer, exchange_seconds, once_around
from canzona_compile.ir.bucket import Bucket
from canzona_compile.machine.hardware import Hardware
from canzona_compile.simulation.engine import (
    Collective,
    CollectiveShare,
    ComputeOp,
    Engine,
    SimulatedOp,
    Span,
    Start,
    Wait,
)

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


# -- what a bucket's collectives ask of a rank ----------------------------------------------------


IN_FLIGHT = 2  # buckets whose collectives are under way at once, as in the runtime; but gloo reduces one at a time
CALLS = 8  # operators that copy a slice, the views and the hook of its parameter among them


@dataclass(frozen=True, slots=True)
class BucketLoad:
    """What one bucket asks of a rank.

    Attributes:
        forward, backward: seconds of computing the passes of the modules whose parameters it holds.
        copied: seconds of copying its values between its own memory and that of parameters or gradients.
    """

    forward: float
    backward: float
    copied: float
    reduced: Transfer
    gathered: Transfer


def bucket_load(
    bucket: Bucket, forward: float, backward: float, hardware: Hardware, replicas: Sequence[int] = (0,)
) -> BucketLoad:
    """The load of a bucket.

    Args:
        forward, backward: seconds of computing the passes of the modules whose parameters it holds.
    """
    copied = 2 * bucket.elements * bucket.dtype.itemsize / hardware.bandwidth
    if hardware.device == "cpu":  # elsewhere the host is ahead
        copied += CALLS * len(bucket.slices) * hardware.launch
    parts = reduction(bucket, hardware), replica_sum(bucket, replicas, hardware)
    reduced = Transfer(sum(t.moved for t in parts), sum(t.latency for t in parts), sum(t.sent for t in parts))
    return BucketLoad(forward, backward, copied, reduced, gathering(bucket, hardware))


@dataclass(frozen=True, slots=True)
class SimulatedPass:
    """One pass of the model."""

    seconds: float
    compute: float
    spans: tuple[Span, ...]

    @property
    def exposed(self) -> float:
        """Seconds that data parallelism adds."""
        return self.seconds - self.compute


def played(
    act: str,
    operations: list[SimulatedOp],
    moving: str,
    transfers: Sequence[Transfer],
    ranks: tuple[int, ...],
    hardware: Hardware,
) -> SimulatedPass:
    """Play a pass."""
    near = hardware.link(ranks) == hardware.node
    taking = ranks if hardware.overlap < 1.0 else ranks[:1]
    collectives = [
        Collective(
            moving,
            i,
            taking,
            (CollectiveShare(own.moved * near, own.moved * (not near), own.sent),) * len(taking),
            own.latency,
        )
        for i, own in enumerate(transfers)
    ]
    by_rank: list[list[SimulatedOp]] = [operations if rank in taking else [] for rank in range(1 + max(taking))]
    found = Engine(by_rank, collectives, hardware, frozenset(taking[:1])).run()
    compute = 0.0  # added up as the engine does, so that nothing is exposed where it plays no more
    for own in operations:
        compute += own.seconds if isinstance(own, ComputeOp) and own.act == act else 0.0
    return SimulatedPass(found.seconds, compute, tuple(sorted(found.spans, key=lambda s: (s.start, s.stream))))


def backward_pass(
    loads: Sequence[BucketLoad], ranks: tuple[int, ...], hardware: Hardware, head: float = 0.0
) -> SimulatedPass:
    """Play a backward pass that reduces each bucket as soon as its gradients are complete.

    Args:
        head: seconds of computing what comes first and completes no gradient, as a head that is tied does.
    """
    operations: list[SimulatedOp] = [ComputeOp("backward", 0, head)]
    for i, own in enumerate(loads):
        operations.append(ComputeOp("backward", i, own.backward))
        if i >= IN_FLIGHT:
            operations.append(Wait(i - IN_FLIGHT))
        operations += [ComputeOp("copy", i, own.copied), Start(i)]
    operations += [Wait(i) for i in range(max(0, len(loads) - IN_FLIGHT), len(loads))]
    return played("backward", operations, "reduce", [own.reduced for own in loads], ranks, hardware)


def forward_pass(
    loads: Sequence[BucketLoad], ranks: tuple[int, ...], hardware: Hardware, overlapped: bool, head: float = 0.0
) -> SimulatedPass:
    """Play the forward pass after a step, and the gathers that return the parameters.

    Args:
        loads: of the buckets, in the order of backward; a forward pass needs them in the reverse order.
        overlapped: whether each module waits for its own bucket only; otherwise all are gathered before.
        head: seconds of computing what comes last and needs no further bucket.
    """
    loads = tuple(reversed(loads))
    computing = [ComputeOp("forward", i, own.forward) for i, own in enumerate(loads)]
    operations: list[SimulatedOp] = [Start(i) for i in range(min(IN_FLIGHT, len(loads)))]
    for i, own in enumerate(loads):
        operations += [Wait(i), ComputeOp("copy", i, own.copied)]
        if i + IN_FLIGHT < len(loads):
            operations.append(Start(i + IN_FLIGHT))
        if overlapped:
            operations.append(computing[i])
    operations += [*([] if overlapped else computing), ComputeOp("forward", len(loads) - 1, head)]
    return played("forward", operations, "gather", [own.gathered for own in loads], ranks, hardware)
