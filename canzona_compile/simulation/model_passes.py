"""Plays the model's own passes around a step under ZeRO-1: backward with reductions, forward with gathers.

All ranks of a data-parallel group compute the same passes at the same time, so only the busiest share of a collective
counts. One rank that has this share stands for all, unless ranks share the processors that move the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from canzona_compile.ir.bucket import Bucket
from canzona_compile.machine.hardware import Hardware
from canzona_compile.simulation.bucket_traffic import Transfer, gathering, reduction
from canzona_compile.simulation.engine import (
    Collective,
    CollectiveShare,
    ComputeOp,
    Engine,
    SimulatedOp,
    Start,
    Wait,
)
from canzona_compile.simulation.figures import Span

IN_FLIGHT = 2  # buckets whose collectives are under way at once, as in the runtime
CALLS = 8  # operators that copy a slice, the views and the hook of its parameter among them


@dataclass(frozen=True, slots=True)
class BucketLoad:
    """What one bucket asks of a rank.

    Attributes:
        forward, backward: seconds of computing the passes of the modules whose parameters it holds.
        copied: seconds of copying its values between its own memory and that of parameters or gradients.
        reduced, gathered: its collectives.
    """

    forward: float
    backward: float
    copied: float
    reduced: Transfer
    gathered: Transfer


def bucket_load(bucket: Bucket, forward: float, backward: float, hardware: Hardware) -> BucketLoad:
    """The load of a bucket.

    Args:
        bucket: the bucket.
        forward, backward: seconds of computing the passes of the modules whose parameters it holds.
        hardware: the rates.
    """
    copied = 2 * bucket.elements * bucket.dtype.itemsize / hardware.bandwidth
    if hardware.device == "cpu":  # elsewhere the host is ahead
        copied += CALLS * len(bucket.slices) * hardware.launch
    return BucketLoad(forward, backward, copied, reduction(bucket, hardware), gathering(bucket, hardware))


@dataclass(frozen=True, slots=True)
class SimulatedPass:
    """One pass of the model.

    Attributes:
        seconds: until the last rank is done.
        compute: what the pass would take on one rank alone.
        spans: of one rank.
    """

    seconds: float
    compute: float
    spans: tuple[Span, ...]

    @property
    def exposed(self) -> float:
        """Seconds that data parallelism adds."""
        return self.seconds - self.compute


class PassWriter:
    """Writes the operations of a rank, and the collectives that it takes part in, one for each bucket."""

    def __init__(
        self,
        act: str,
        loads: Sequence[BucketLoad],
        transfers: Sequence[Transfer],
        ranks: tuple[int, ...],
        hardware: Hardware,
    ) -> None:
        self.loads = loads
        near = hardware.link(ranks) == hardware.node
        self.hardware, self.ranks = hardware, ranks if not hardware.overlap else ranks[:1]
        self.operations: list[SimulatedOp] = []
        self.collectives = [
            Collective(
                act,
                i,
                self.ranks,
                (CollectiveShare(own.moved * near, own.moved * (not near), own.sent),) * len(self.ranks),
                own.latency,
            )
            for i, own in enumerate(transfers)
        ]
        self.compute = 0.0

    def work(self, act: str, bucket: int, seconds: float) -> None:
        self.compute += seconds
        self.operations.append(ComputeOp(act, bucket, seconds))

    def copy(self, bucket: int) -> None:
        self.operations.append(ComputeOp("copy", bucket, self.loads[bucket].copied))

    def played(self) -> SimulatedPass:
        silent: list[list[SimulatedOp]] = [[] for _ in range(1 + max(self.ranks))]
        for rank in self.ranks:
            silent[rank] = self.operations
        engine = Engine(
            silent,
            self.collectives,
            self.hardware.processors,
            self.hardware.ranks_per_node,
            not self.hardware.overlap,
            frozenset(self.ranks[:1]),
        )
        found = engine.run()
        return SimulatedPass(found.seconds, self.compute, tuple(sorted(found.spans, key=lambda s: (s.start, s.stream))))


def backward_pass(
    loads: Sequence[BucketLoad], ranks: tuple[int, ...], hardware: Hardware, head: float = 0.0
) -> SimulatedPass:
    """Play a backward pass that reduces each bucket as soon as its gradients are complete.

    Args:
        loads: of the buckets, in order.
        ranks: the data-parallel ranks.
        hardware: the rates.
        head: seconds of computing what comes first and completes no gradient, as a head that is tied does.
    """
    writer = PassWriter("reduce", loads, [own.reduced for own in loads], ranks, hardware)
    writer.work("backward", 0, head)
    for i, own in enumerate(loads):
        writer.work("backward", i, own.backward)
        if i >= IN_FLIGHT:
            writer.operations.append(Wait(i - IN_FLIGHT))
        writer.copy(i)
        writer.operations.append(Start(i))
    writer.operations += [Wait(i) for i in range(max(0, len(loads) - IN_FLIGHT), len(loads))]
    return writer.played()


def forward_pass(
    loads: Sequence[BucketLoad], ranks: tuple[int, ...], hardware: Hardware, overlapped: bool, head: float = 0.0
) -> SimulatedPass:
    """Play the forward pass after a step, and the gathers that return the parameters.

    Args:
        loads: of the buckets, in the order of backward; a forward pass needs them in the reverse order.
        ranks: the data-parallel ranks.
        hardware: the rates.
        overlapped: whether each module waits for its own bucket only; otherwise all are gathered before.
        head: seconds of computing what comes last and needs no further bucket.
    """
    loads = tuple(reversed(loads))
    writer = PassWriter("gather", loads, [own.gathered for own in loads], ranks, hardware)
    writer.operations += [Start(i) for i in range(min(IN_FLIGHT, len(loads)))]
    for i, own in enumerate(loads):
        writer.operations.append(Wait(i))
        writer.copy(i)
        if i + IN_FLIGHT < len(loads):
            writer.operations.append(Start(i + IN_FLIGHT))
        if overlapped:
            writer.work("forward", i, own.forward)
    if not overlapped:
        for i, own in enumerate(loads):
            writer.work("forward", i, own.forward)
    writer.work("forward", len(loads) - 1, head)
    return writer.played()
