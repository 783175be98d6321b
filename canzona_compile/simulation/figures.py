"""The figures of a simulated step, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

COMPUTE = "compute"  # the stream of a rank's processor
NODE = "node"  # the stream of its links to the ranks of its node
NETWORK = "network"  # the stream of its links to other nodes
STREAMS = (COMPUTE, NODE, NETWORK)


@dataclass(frozen=True, slots=True)
class Span:
    """Something that keeps one stream of one rank busy.

    Attributes:
        act: an act of the schedule, e.g. "compute", "start gather".
        start, end: seconds from the begin of the step.
        tasks: the matrices that the rank computes in this span; empty for other acts.
        flow: the number of the collective, equal on all of its spans; -1 for a span of no collective.
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
    """The bytes of buffers that a rank holds from a moment on."""

    rank: int
    at: float
    bytes: int


@dataclass(frozen=True, slots=True)
class RankSummary:
    """One rank's step, in seconds, and bytes.

    Attributes:
        compute: seconds that its processor works.
        exposed: seconds that its processor waits while a collective that it needs is in transit.
        bubble: seconds that its processor waits for other ranks: for a collective that has not begun, because a rank
            has not started it yet, and from its own end to that of the last rank.
        peak: most bytes of buffers at any time.
        sent: bytes that it sends to other ranks.
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
        sent: (micro-group, phase, bytes that ranks send to other ranks).
        acts: (act of the schedule, seconds that it takes the mean rank of those in `shown`, waiting included).
    """

    seconds: float
    ranks: tuple[RankSummary, ...]
    shown: tuple[int, ...]
    spans: tuple[Span, ...]
    memory: tuple[Memory, ...]
    sent: tuple[tuple[int, str, int], ...] = ()
    acts: tuple[tuple[str, float], ...] = ()
