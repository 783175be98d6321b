"""What a simulated step amounts to: plain data."""

from __future__ import annotations

from dataclasses import dataclass

COMPUTE = "compute"  # the stream of a rank's processor
NODE = "node"  # its links to the ranks of its node
NETWORK = "network"  # its links to other nodes
STREAMS = (COMPUTE, NODE, NETWORK)


@dataclass(frozen=True, slots=True)
class Span:
    """Something that keeps one stream of one rank busy.

    Attributes:
        stream: one of STREAMS.
        act: of the schedule, e.g. "compute", "start gather".
        group: micro-group.
        start, end: seconds from the begin of the step.
        tasks: matrices that the rank computes meanwhile; empty for other acts.
        bytes: that the rank sends, of transfers.
        flow: the same number on all spans of one collective; -1 where it is none.
    """

    rank: int
    stream: str
    act: str
    group: int
    start: float
    end: float
    tasks: tuple[str, ...] = ()
    bytes: int = 0
    flow: int = -1


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of buffers that a rank holds from a moment on."""

    rank: int
    at: float
    bytes: int


@dataclass(frozen=True, slots=True)
class RankSummary:
    """One rank's step, in seconds, and bytes.

    Attributes:
        compute: its processor works.
        exposed: its processor waits while a collective that it needs is on its way.
        bubble: its processor waits for others: a collective has not begun, because a rank is not there yet; and
            from its own end to that of the last rank.
        finish: the step is over for it.
        peak: most bytes of buffers at any time.
        sent: to other ranks.
    """

    rank: int
    compute: float
    exposed: float
    bubble: float
    finish: float
    peak: int
    sent: int


@dataclass(frozen=True, slots=True)
class Simulation:
    """A step of all ranks.

    Attributes:
        seconds: until the last rank is done.
        ranks: a summary of each, by rank.
        spans, memory: of the ranks in `shown` only.
        sent: (micro-group, phase, bytes that leave a rank, summed over all ranks).
    """

    seconds: float
    ranks: tuple[RankSummary, ...]
    shown: tuple[int, ...]
    spans: tuple[Span, ...]
    memory: tuple[Memory, ...]
    sent: tuple[tuple[int, str, int], ...] = ()
