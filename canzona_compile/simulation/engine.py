"""A discrete-event simulation of ranks that compute, start collectives and wait for them.

Every rank runs its operations in order. Work takes a processor, which the ranks of a node may share: n jobs on C
processors each run at min(1, C / n) of full speed. A collective begins when all of its members have started it and
their links are free of earlier ones. It is over for a member when that member's part has arrived. If processors move
the bytes themselves, a part is a job that takes a processor, beside the rank's other work; if they take part in that,
a share of it is.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from canzona_compile.machine.hardware import Hardware

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

    @property
    def exposed(self) -> float:
        """Seconds of waiting for communication, on the rank that waits most."""
        return max((rank.exposed for rank in self.ranks), default=0.0)

    @property
    def peak(self) -> int:
        """Most bytes of buffers on a rank."""
        return max((rank.peak for rank in self.ranks), default=0)


@dataclass(frozen=True, slots=True)
class ComputeOp:
    """Work for some seconds of a processor."""

    act: str
    group: int
    seconds: float
    tasks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Start:
    """Take part in a collective and go on."""

    collective: int


@dataclass(frozen=True, slots=True)
class Wait:
    """Go on when this rank's part of a collective is over."""

    collective: int


SimulatedOp = ComputeOp | Start | Wait


@dataclass(frozen=True, slots=True)
class CollectiveShare:
    """One member's part of a collective: seconds of its links within the node and to other nodes, and bytes sent."""

    node: float
    network: float
    sent: int = 0


@dataclass(frozen=True, slots=True)
class Collective:
    """An exchange among `members`, with a part for each.

    Attributes:
        latency: seconds until the first data arrives. If processors move the bytes, seconds of each member's processor.
    """

    act: str
    group: int
    members: tuple[int, ...]
    parts: tuple[CollectiveShare, ...]
    latency: float


class Node:
    """The processors that the ranks of a node share."""

    def __init__(self, processors: int) -> None:
        self.processors = processors
        self.jobs: list[tuple[float, int, Callable[[float], None]]] = []  # sorted by the virtual time of their end
        self.virtual = self.now = 0.0
        self.version = 0

    @property
    def speed(self) -> float:
        return min(1.0, self.processors / len(self.jobs)) if self.jobs else 1.0

    def advance(self, now: float) -> None:
        self.virtual += (now - self.now) * self.speed
        self.now = now
        self.version += 1

    def next_end(self) -> float:
        return self.now + max(0.0, self.jobs[0][0] - self.virtual) / self.speed


class Engine:
    """One simulated step: `run` plays it, and fills in what happened.

    Args:
        hardware: how many ranks share how many processors of a node, and whether communication has links that work
            beside these, or takes them too (gloo).

    Attributes:
        compute, exposed, bubble, finish: seconds by rank, as in `RankSummary`.
        moments: when each operation of a shown rank began and ended.
    """

    def __init__(
        self,
        operations: Sequence[Sequence[SimulatedOp]],
        collectives: Sequence[Collective],
        hardware: Hardware,
        shown: frozenset[int],
    ) -> None:
        self.operations, self.collectives, self.shown = operations, collectives, shown
        ranks = len(operations)
        self.alone, self.ranks_per_node = not hardware.overlap, hardware.ranks_per_node
        self.taken = 1.0 - hardware.overlap  # of the seconds of a collective, those of a processor
        self.shared = hardware.processors < self.ranks_per_node or self.taken > 0.0
        self.nodes = [Node(hardware.processors) for _ in range(-(-ranks // self.ranks_per_node))]
        self.place = [0] * ranks  # the index of the next operation
        self.links = {NODE: [0.0] * ranks, NETWORK: [0.0] * ranks}  # the time at which each link is free
        self.issued: list[dict[int, float]] = [{} for _ in collectives]
        self.begun: list[float | None] = [None] * len(collectives)
        self.over: list[dict[int, float]] = [{} for _ in collectives]
        self.waiting: list[dict[int, float]] = [{} for _ in collectives]
        self.queue: list[tuple[float, int, Callable[[float], None]]] = []
        self.count = 0
        self.seconds = 0.0
        self.compute, self.exposed, self.bubble, self.finish = ([0.0] * ranks for _ in range(4))
        self.spans: list[Span] = []
        self.moments: dict[int, list[tuple[float, float]]] = {rank: [] for rank in shown}

    def run(self) -> Engine:
        """Play all operations, and return this."""
        for rank in range(len(self.operations)):
            self.go_on(rank, 0.0)
        while self.queue:
            now, _, action = heapq.heappop(self.queue)
            action(now)
        stuck = [rank for rank, own in enumerate(self.operations) if self.place[rank] < len(own)]
        if stuck:
            raise AssertionError(f"ranks {stuck[:4]} wait for a collective that some of its members never start")
        self.seconds = max(self.finish, default=0.0)
        for rank, finish in enumerate(self.finish):
            self.bubble[rank] += self.seconds - finish
        return self

    def at(self, when: float, action: Callable[[float], None]) -> None:
        self.count += 1
        heapq.heappush(self.queue, (when, self.count, action))

    def go_on(self, rank: int, now: float) -> None:
        """Run a rank's operations until one takes time."""
        own = self.operations[rank]
        while self.place[rank] < len(own):
            operation = own[self.place[rank]]
            match operation:
                case ComputeOp(seconds=seconds) if seconds > 0:
                    self.work(rank, now, seconds, partial(self.worked, rank, operation, now))
                    return
                case Start(number):
                    self.issue(rank, number, now)
                case Wait(number):
                    over = self.over[number].get(rank)
                    if over is None:
                        self.waiting[number][rank] = now
                        return
                    if over > now:
                        self.at(over, partial(self.waited, rank, number, now))
                        return
            self.passed(rank, now, now)
        self.finish[rank] = now

    def passed(self, rank: int, begin: float, end: float) -> None:
        self.place[rank] += 1
        if rank in self.shown:
            self.moments[rank].append((begin, end))

    def worked(self, rank: int, operation: ComputeOp, begin: float, end: float) -> None:
        self.compute[rank] += end - begin
        if rank in self.shown:
            span = Span(rank, COMPUTE, operation.act, operation.group, begin, end, operation.tasks)
            self.spans.append(span)
        self.passed(rank, begin, end)
        self.go_on(rank, end)

    def waited(self, rank: int, number: int, begin: float, end: float) -> None:
        begun = self.begun[number]
        assert begun is not None
        late = min(max(begun - begin, 0.0), end - begin)
        self.bubble[rank] += late
        self.exposed[rank] += end - begin - late
        self.passed(rank, begin, end)
        self.go_on(rank, end)

    def work(self, rank: int, now: float, seconds: float, done: Callable[[float], None]) -> None:
        """Take a processor of the rank's node for `seconds`, or longer if other jobs need it too."""
        if not self.shared:
            self.at(now + seconds, done)
            return
        node = self.nodes[rank // self.ranks_per_node]
        node.advance(now)
        self.count += 1
        heapq.heappush(node.jobs, (node.virtual + seconds, self.count, done))
        self.look_again(node)

    def look_again(self, node: Node) -> None:
        self.at(node.next_end(), partial(self.finish_job, node, node.version))

    def finish_job(self, node: Node, version: int, now: float) -> None:
        if version != node.version:
            return  # another job came or went meanwhile, and a later check follows
        node.advance(now)
        _, _, done = heapq.heappop(node.jobs)
        node.version += 1
        if node.jobs:
            self.look_again(node)
        done(now)

    def issue(self, rank: int, number: int, now: float) -> None:
        collective, issued = self.collectives[number], self.issued[number]
        issued[rank] = now
        if len(issued) < len(collective.members):
            return
        begin = max(issued.values())
        for member, part in zip(collective.members, collective.parts, strict=True):
            for link, busy in ((NODE, part.node), (NETWORK, part.network)):
                if busy and not self.alone:
                    begin = max(begin, self.links[link][member])
        self.begun[number] = begin
        for member, part in zip(collective.members, collective.parts, strict=True):
            if self.alone:
                self.at(begin, partial(self.carry, member, number, part))
                continue
            end = begin + collective.latency + max(part.node, part.network)
            for link, busy in ((NODE, part.node), (NETWORK, part.network)):
                if busy:
                    self.links[link][member] = end
                    self.show(collective, number, member, link, begin, end, part.sent)
            if self.taken and end > begin:
                seconds = self.taken * (end - begin)
                self.at(begin, partial(self.help, member, number, seconds, end))
            else:
                self.arrive(member, number, end)

    def help(self, member: int, number: int, seconds: float, end: float, begin: float) -> None:
        """Take a processor for some seconds of a member's part, which ends no earlier than its links let it."""
        self.work(member, begin, seconds, lambda done: self.arrive(member, number, max(done, end)))

    def carry(self, member: int, number: int, part: CollectiveShare, begin: float) -> None:
        """Move a member's part with a processor. Latency is work for it as well: system calls and waking threads."""
        collective = self.collectives[number]
        seconds = collective.latency + part.node + part.network

        def done(end: float) -> None:
            self.show(collective, number, member, NODE, begin, end, part.sent)
            self.arrive(member, number, end)

        if seconds > 0:
            self.work(member, begin, seconds, done)
        else:
            done(begin)

    def show(self, own: Collective, number: int, rank: int, link: str, begin: float, end: float, sent: int) -> None:
        if rank in self.shown:
            self.spans.append(Span(rank, link, own.act, own.group, begin, end, (), sent, number))

    def arrive(self, member: int, number: int, end: float) -> None:
        self.over[number][member] = end
        since = self.waiting[number].pop(member, None)
        if since is not None:
            self.at(end, partial(self.waited, member, number, since))
