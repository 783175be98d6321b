"""Insert events between the CUDA streams of a rank program, so that calls wait for the calls they depend on.

A program is a total order of calls, and each call runs on one stream. Calls of the same stream run in order without
help. Two calls of different streams need an event between them if one of them writes memory that the other one reads
or writes. The event is left out if other events imply it already; vector clocks tell (Fidge 1988, Mattern 1989). A
collective is done when a stream has waited for it, not when it has started.

Memory has a stream, too. Once no value needs it, torch's allocator gives it to the next tensor of the stream that made
it, without waiting for others that may still read it. So a value that another stream reads is kept until its own
stream has waited for that one. `Tensor.record_stream` would do without: it leaves memory in use until the host happens
to look, so that the peak of a step depends on how far the host is ahead.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from canzona_compile.ir import program_ops, storage
from canzona_compile.ir.program import Fragments, Input, Residents, StreamSet, View, Views, Whole

CALLER = "caller"  # the stream that is current when the program begins
COMPUTE = "compute"  # runs matrix products and all other work of owners
PACK = "pack"  # runs elementwise work, and copies to and from buffers
STATE = "state"  # fetches and stores state


def stream_of_lane(number: int) -> str:
    """The stream of a lane in which owners compute."""
    return f"{COMPUTE} {number}" if number else COMPUTE


def computes(stream: str) -> bool:
    """Whether owners compute on a stream."""
    return stream.split()[0] == COMPUTE


# These calls index lists or make views on the host. They give a stream nothing to do.
LOOKS = (operator.getitem, program_ops.parts, program_ops.unstack, program_ops.repeated, storage.part)

# These read their arguments, and write none of them.
READS = (
    program_ops.compact,
    program_ops.divide,
    program_ops.for_each,
    program_ops.join,
    program_ops.matrices,
    program_ops.spread,
    program_ops.stack,
    storage.fetch,
    storage.room,
)

Resource = Hashable  # a leaf of a task, a computed value, or a `SlotRange`
StreamClock = dict[str, int]  # for each stream, how many of its calls are done


@dataclass(frozen=True, slots=True)
class SlotRange:
    """Bytes [start, end) of a memory slot."""

    slot: int
    start: int
    end: int


@dataclass(slots=True)
class Uses:
    """The calls that used a resource: the last one that wrote it, and the last of each stream that read it since.

    Each call is given as its stream and its number on that stream.
    """

    written: tuple[str, int] | None = None
    read: StreamClock = field(default_factory=dict)


@dataclass(slots=True)
class Orders:
    """The synchronization that has to be written into the program.

    Attributes:
        waits: for each call, the events that its stream waits for before it.
        keeps: for each call, the values that must not be freed before it (see `program_ops.keep`).
        kept: the values that must not be freed before the caller's stream has waited for all others.
        records: for each call, the event that its stream records after it.
    """

    waits: dict[fx.Node, list[int]] = field(default_factory=dict)
    keeps: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)
    kept: list[fx.Node] = field(default_factory=list)
    records: dict[fx.Node, int] = field(default_factory=dict)


def order_streams(
    graph: fx.Graph,
    streams: Mapping[fx.Node, str],
    inputs: Mapping[str, Input],
    bind: Callable[[StreamSet], fx.Node],
    written: Mapping[fx.Node, Collection[fx.Node]],
) -> None:
    """Write stream changes, and the events between streams, into a program.

    A program whose calls use fewer than two streams beside the caller's stays as it is.

    Args:
        written: for some calls, the arguments that the call writes. Such a call only reads its other arguments.
    """
    calls = [n for n in graph.nodes if n in streams]
    names = tuple(dict.fromkeys(streams[n] for n in calls if streams[n] != CALLER and n.target not in LOOKS))
    if len(names) < 2:
        return
    begin = sum(streams[n] == CALLER for n in calls)
    assert all(streams[n] == CALLER for n in calls[:begin])
    analysis = Analysis(streams, inputs, written)
    for node in graph.nodes:
        analysis.visit(node)
    analysis.keep()
    ends = analysis.numbered()
    handle = bind(StreamSet(names, 1 + len(set(analysis.orders.records.values()))))
    write(graph, [n for n in calls[begin:] if n.target not in LOOKS], streams, analysis.orders, ends, handle)


class Analysis:
    """Goes through a program, node by node, and finds what each call has to wait for.

    The arguments are those of `order_streams`. The result is in `orders`.
    """

    def __init__(
        self,
        streams: Mapping[fx.Node, str],
        inputs: Mapping[str, Input],
        written: Mapping[fx.Node, Collection[fx.Node]],
    ) -> None:
        self.streams, self.inputs, self.written = streams, inputs, written
        self.uses: dict[Resource, Uses] = {}
        self.extents: dict[int, list[SlotRange]] = {}  # for each slot, its ranges that are in `uses`
        self.behind: dict[fx.Node, frozenset[Resource]] = {}  # the memory that a value may be or may be a view of
        self.makers: dict[fx.Node, fx.Node] = {}  # the call that made what a value is a view of
        self.foreign: dict[fx.Node, set[str]] = {}  # by maker, the other streams that read what it made
        self.last: dict[tuple[Resource, str], int] = {}  # the last call of a stream that used a resource
        self.clocks: dict[str, StreamClock] = {}
        self.at: dict[tuple[str, int], tuple[fx.Node, StreamClock]] = {}
        self.flying: dict[fx.Node, tuple[StreamClock, frozenset[Resource], frozenset[Resource]]] = {}
        self.waited: dict[fx.Node, list[tuple[str, int]]] = {}
        self.orders = Orders()

    def visit(self, node: fx.Node) -> None:
        """Take in the next node of the program."""
        if node.op == "placeholder":
            self.behind[node] = frozenset(resources(self.inputs[node.name]))
        elif node.op in ("call_function", "call_module"):
            through = frozenset[Resource]().union(*(self.behind.get(n, frozenset()) for n in node.all_input_nodes))
            own = frozenset() if node.target in LOOKS else frozenset([("value", node.name)])
            self.behind[node] = through | own
            stream = self.streams.get(node, CALLER)
            if node.target in LOOKS:
                viewed = next(iter(node.all_input_nodes), None)
                if viewed in self.makers:
                    self.makers[node] = self.makers[viewed]
            elif stream != CALLER:
                self.makers[node] = node
                self.call(node, stream)

    def call(self, node: fx.Node, stream: str) -> None:
        """Find the events that a call on a stream waits for, and remember what it reads and writes."""
        clock = self.clocks.setdefault(stream, {})
        number = clock.get(stream, 0) + 1
        if node.target is program_ops.finish:
            started, read, written = self.flying.pop(node.args[0])  # type: ignore[arg-type]
            join(clock, started)
            self.step(node, stream, number, clock)
            self.used(stream, number, read, written)
            return
        read, written = self.accesses(node)
        for need in sorted(self.needs(read, written), key=lambda n: -n[1]):
            if need[0] != stream and clock.get(need[0], 0) < need[1]:
                self.waited.setdefault(node, []).append(need)
                join(clock, self.at[need][1])
        if not clock.get(CALLER):
            clock[CALLER] = 1
            self.orders.waits[node] = [0]
        self.step(node, stream, number, clock)
        for maker in (self.makers[n] for n in node.all_input_nodes if n in self.makers):
            if self.streams[maker] != stream:
                self.foreign.setdefault(maker, set()).add(stream)
        if node.target is program_ops.start_all_to_all:
            self.flying[node] = dict(clock), read, written
        else:
            self.used(stream, number, read, written | {("value", node.name)})

    def step(self, node: fx.Node, stream: str, number: int, clock: StreamClock) -> None:
        """Advance the clock of a stream to a call, and keep a copy of it."""
        clock[stream] = number
        self.at[stream, number] = node, dict(clock)

    def accesses(self, node: fx.Node) -> tuple[frozenset[Resource], frozenset[Resource]]:
        """The resources that a call reads, and those that it writes.

        A call of a graph may write all of its arguments, unless `written` says which ones.
        """
        given: list[frozenset[Resource]] = [
            frozenset[Resource]().union(*(self.behind.get(n, frozenset()) for n in nodes_in(a))) for a in node.args
        ]
        everything = frozenset[Resource]().union(*given)
        if node in self.written:
            targets = set(self.written[node])
            read, written = (
                frozenset[Resource]().union(*(self.behind[n] for n in node.all_input_nodes if (n in targets) is kind))
                for kind in (False, True)
            )
            return read, written
        if node.target in (program_ops.copy, program_ops.start_all_to_all, storage.store):  # (targets, sources, ...)
            return given[1], given[0]
        if node.target in READS:
            return everything, frozenset()
        return everything, everything

    def needs(self, read: frozenset[Resource], written: frozenset[Resource]) -> set[tuple[str, int]]:
        """The calls that must be done before a call that reads and writes these resources.

        They are the last writers of all these resources, and the readers of those that are written.
        """
        found: set[tuple[str, int]] = set()
        for resource in read | written:
            for uses in (self.uses[other] for other in self.overlapping(resource)):
                if uses.written is not None:
                    found.add(uses.written)
                if resource in written:
                    found |= set(uses.read.items())
        return found

    def overlapping(self, resource: Resource) -> list[Resource]:
        """The resources that were used before and share memory with `resource`."""
        if not isinstance(resource, SlotRange):
            return [resource] if resource in self.uses else []
        known = self.extents.get(resource.slot, ())
        return [e for e in known if e.start < resource.end and resource.start < e.end]

    def used(self, stream: str, number: int, read: frozenset[Resource], written: frozenset[Resource]) -> None:
        """Remember which resources call `number` of a stream reads and writes."""
        for resource in read | written:
            if isinstance(resource, SlotRange) and resource not in self.uses:
                self.extents.setdefault(resource.slot, []).append(resource)
            self.uses.setdefault(resource, Uses()).read[stream] = number
            self.last[resource, stream] = number
            if resource in written:
                self.uses[resource] = Uses((stream, number))

    def keep(self) -> None:
        """Find how long each value is kept that another stream than its own reads.

        Its own stream has waited for the reader once a call of it comes after the last call that may read the value,
        or a value that was made of it and may be a view of it. Until then, each call of it may get memory that is
        free. After the program no stream gets any before it has waited.
        """
        order = {node: i for i, (node, _) in enumerate(self.at.values())}
        for maker, readers in self.foreign.items():
            needs = {stream: self.last[("value", maker.name), stream] for stream in readers}
            own = self.streams[maker]
            read = max(order[self.at[need][0]] for need in needs.items())
            later = [self.at[own, n] for n in range(1, 1 + self.clocks[own][own]) if order[self.at[own, n][0]] > read]
            first = next((node for node, clock in later if all(clock.get(s, 0) >= n for s, n in needs.items())), None)
            if first is not None and first is not later[0][0]:
                self.orders.keeps.setdefault(first, []).append(maker)
            elif first is None and later:
                self.orders.kept.append(maker)

    def ends(self) -> list[tuple[str, int]]:
        """The calls that the caller's stream waits for at the end. Together they imply that all calls are done."""
        order = {node: i for i, (node, _) in enumerate(self.at.values())}
        last = [(stream, clock[stream]) for stream, clock in self.clocks.items()]
        found, done = [], StreamClock()
        for need in sorted(last, key=lambda n: -order[self.at[n][0]]):
            if done.get(need[0], 0) < need[1]:
                found.append(need)
                join(done, self.at[need][1])
        return found

    def numbered(self) -> list[int]:
        """Number the events of `orders` from 1 on. Event 0 is the one that the caller's stream records first."""
        after: dict[tuple[str, int], int] = {}

        def event(need: tuple[str, int]) -> int:
            found = after.setdefault(need, 1 + len(after))
            self.orders.records[self.at[need][0]] = found
            return found

        for node, needs in self.waited.items():
            self.orders.waits.setdefault(node, []).extend(map(event, needs))
        return [event(need) for need in self.ends()]


def write(
    graph: fx.Graph,
    calls: list[fx.Node],
    streams: Mapping[fx.Node, str],
    orders: Orders,
    ends: list[int],
    handle: fx.Node,
) -> None:
    """Insert the calls of `program_ops` that change streams, and record and wait for events."""
    current = CALLER
    with graph.inserting_before(calls[0]):
        graph.call_function(program_ops.record, (handle, 0))
    for node in calls:
        stream = streams[node]
        with graph.inserting_before(node):
            if stream != current:
                graph.call_function(program_ops.on_stream, (handle, stream))
                current = stream
            for event in orders.waits.get(node, ()):
                graph.call_function(program_ops.wait, (handle, event))
            if node in orders.keeps:
                graph.call_function(program_ops.keep, (orders.keeps[node],))
        if node in orders.records:
            with graph.inserting_after(node):
                graph.call_function(program_ops.record, (handle, orders.records[node]))
    with graph.inserting_before(next(n for n in reversed(graph.nodes) if n.op == "output")):
        graph.call_function(program_ops.on_stream, (handle, CALLER))
        for event in ends:
            graph.call_function(program_ops.wait, (handle, event))
        if orders.kept:
            graph.call_function(program_ops.keep, (orders.kept,))


def join(clock: StreamClock, other: Mapping[str, int]) -> None:
    """Raise each entry of a clock, in place, to that of another clock if the latter is larger."""
    for stream, number in other.items():
        clock[stream] = max(clock.get(stream, 0), number)


def nodes_in(argument: Any) -> list[fx.Node]:
    """The nodes in an argument, which may be a nested list."""
    found: list[fx.Node] = []
    fx.map_arg(argument, found.append)
    return found


def resources(value: Input) -> list[Resource]:
    """The memory that an input of a program stands for."""
    match value:
        case Views(views):
            return hulls(views)
        case Whole(view):
            return hulls([view])
        case Fragments(role, leaf, tasks):
            return [(str(role), leaf, task) for task in tasks]
        case Residents(leaf, tasks):
            return [("resident", leaf, task) for task in tasks]
    return []


def hulls(views: Iterable[View]) -> list[Resource]:
    """For each slot, the range from the first byte of its views to the last one."""
    found: dict[int, SlotRange] = {}
    for view in views:
        own = SlotRange(view.slot, view.offset, view.offset + view.nbytes)
        old = found.get(view.slot, own)
        found[view.slot] = SlotRange(view.slot, min(old.start, own.start), max(old.end, own.end))
    return list(found.values())
