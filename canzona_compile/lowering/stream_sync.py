"""Events between the streams of a rank program: which call waits for which.

A program is a total order of calls, each on a stream. Calls of one stream run in that order by themselves. Where
one reads or writes what a call of another stream wrote, or writes what it reads, an event stands between them,
unless it follows from others already (vector clocks tell, as in Fidge 1988 and Mattern 1989). A collective counts
as done where a stream has waited for it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from canzona_compile.ir import program_ops
from canzona_compile.ir.program import Fragments, Input, Residents, StreamSet, View, Views, Whole

CALLER = "caller"  # the stream that is current when the program begins
COMPUTE = "compute"  # products and what is computed on owners
PACK = "pack"  # elementwise work, and copies from and to buffers

# The host looks into lists, or makes views: no stream has anything to do.
LOOKS = (operator.getitem, program_ops.parts, program_ops.unstack, program_ops.repeated)

Resource = Hashable  # a leaf of a task, a computed value, or an `SlotRange`
StreamClock = dict[str, int]  # by stream: how many of its calls are done


@dataclass(frozen=True, slots=True)
class SlotRange:
    """Bytes [start, end) of a memory slot."""

    slot: int
    start: int
    end: int


@dataclass(slots=True)
class Uses:
    """When a resource was used: the last write, and the reads since, as (stream, number of the call)."""

    written: tuple[str, int] | None = None
    read: StreamClock = field(default_factory=dict)


@dataclass(slots=True)
class Orders:
    """What has to be written into the program around its calls."""

    waits: dict[fx.Node, list[int]] = field(default_factory=dict)
    lends: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)
    records: dict[fx.Node, int] = field(default_factory=dict)


def order_streams(
    graph: fx.Graph,
    streams: Mapping[fx.Node, str],
    inputs: Mapping[str, Input],
    bind: Callable[[StreamSet], fx.Node],
    written: Mapping[fx.Node, Collection[fx.Node]],
) -> None:
    """Write the streams, and the events between them, into a program. Where all calls share one, nothing is written.

    Args:
        streams: of the calls; those of `CALLER` come first.
        inputs: of the program, by placeholder.
        bind: makes the placeholder of the streams.
        written: by call, the arguments that it writes, where that is known; it reads the others.
    """
    calls = [n for n in graph.nodes if n in streams]
    names = tuple(dict.fromkeys(streams[n] for n in calls if streams[n] != CALLER))
    if len(names) < 2:
        return
    begin = sum(streams[n] == CALLER for n in calls)
    assert all(streams[n] == CALLER for n in calls[:begin])
    analysis = Analysis(streams, inputs, written)
    for node in graph.nodes:
        analysis.visit(node)
    ends = analysis.numbered()
    handle = bind(StreamSet(names, 1 + len(set(analysis.orders.records.values()))))
    write(graph, [n for n in calls[begin:] if n.target not in LOOKS], streams, analysis.orders, ends, handle)


class Analysis:
    """Goes through a program and finds what each call has to wait for."""

    def __init__(
        self,
        streams: Mapping[fx.Node, str],
        inputs: Mapping[str, Input],
        written: Mapping[fx.Node, Collection[fx.Node]],
    ) -> None:
        self.streams, self.inputs, self.written = streams, inputs, written
        self.uses: dict[Resource, Uses] = {}
        self.extents: dict[int, list[SlotRange]] = {}  # of each slot, those that are in `uses`
        self.behind: dict[fx.Node, frozenset[Resource]] = {}  # what a value may be, or be a view of
        self.homes: dict[fx.Node, frozenset[str]] = {}  # streams whose memory a value may lie in
        self.clocks: dict[str, StreamClock] = {}
        self.at: dict[tuple[str, int], tuple[fx.Node, StreamClock]] = {}
        self.flying: dict[fx.Node, tuple[StreamClock, frozenset[Resource], frozenset[Resource]]] = {}
        self.waited: dict[fx.Node, list[tuple[str, int]]] = {}
        self.lent: set[tuple[Any, str]] = set()  # values that a stream may read: its own, or lent to it
        self.orders = Orders()

    def visit(self, node: fx.Node) -> None:
        if node.op == "placeholder":
            self.behind[node] = frozenset(resources(self.inputs[node.name]))
            self.homes[node] = frozenset()
        elif node.op in ("call_function", "call_module"):
            through = frozenset[Resource]().union(*(self.behind.get(n, frozenset()) for n in node.all_input_nodes))
            own = frozenset() if node.target in LOOKS else frozenset([("value", node.name)])
            self.behind[node] = through | own
            self.homes[node] = frozenset[str]().union(*(self.homes.get(n, frozenset()) for n in node.all_input_nodes))
            stream = self.streams.get(node, CALLER)
            if stream != CALLER and node.target not in LOOKS:
                self.call(node, stream)
                self.homes[node] |= {stream}
                self.lent.add((node, stream))
            elif node.target in LOOKS:
                self.lent |= {(node, s) for s in (COMPUTE, PACK) if (node.args[0], s) in self.lent}

    def call(self, node: fx.Node, stream: str) -> None:
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
        for value in node.all_input_nodes:
            if self.homes.get(value, frozenset()) - {stream} and (value, stream) not in self.lent:
                self.lent.add((value, stream))
                self.orders.lends.setdefault(node, []).append(value)
        if node.target is program_ops.start_all_to_all:
            self.flying[node] = dict(clock), read, written
        else:
            self.used(stream, number, read, written | {("value", node.name)})

    def step(self, node: fx.Node, stream: str, number: int, clock: StreamClock) -> None:
        clock[stream] = number
        self.at[stream, number] = node, dict(clock)

    def accesses(self, node: fx.Node) -> tuple[frozenset[Resource], frozenset[Resource]]:
        """What a call reads and writes. One of a graph may write whatever it is given."""
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
        if node.target in (program_ops.copy, program_ops.start_all_to_all):  # (targets, sources, ...)
            return given[1], given[0]
        if node.target in (program_ops.compact, program_ops.stack, program_ops.spread):
            return everything, frozenset()
        return everything, everything

    def needs(self, read: frozenset[Resource], written: frozenset[Resource]) -> set[tuple[str, int]]:
        """The calls that must be done: writers of what is used, readers of what is written."""
        found: set[tuple[str, int]] = set()
        for resource in read | written:
            for uses in (self.uses[other] for other in self.overlapping(resource)):
                if uses.written is not None:
                    found.add(uses.written)
                if resource in written:
                    found |= set(uses.read.items())
        return found

    def overlapping(self, resource: Resource) -> list[Resource]:
        """What was used before and shares memory with a resource."""
        if not isinstance(resource, SlotRange):
            return [resource] if resource in self.uses else []
        known = self.extents.get(resource.slot, ())
        return [e for e in known if e.start < resource.end and resource.start < e.end]

    def used(self, stream: str, number: int, read: frozenset[Resource], written: frozenset[Resource]) -> None:
        for resource in read | written:
            if isinstance(resource, SlotRange) and resource not in self.uses:
                self.extents.setdefault(resource.slot, []).append(resource)
            self.uses.setdefault(resource, Uses()).read[stream] = number
            if resource in written:
                self.uses[resource] = Uses((stream, number))

    def ends(self) -> list[tuple[str, int]]:
        """The calls that the caller has to wait for, so that it comes after all."""
        order = {node: i for i, (node, _) in enumerate(self.at.values())}
        last = [(stream, clock[stream]) for stream, clock in self.clocks.items()]
        found, done = [], StreamClock()
        for need in sorted(last, key=lambda n: -order[self.at[n][0]]):
            if done.get(need[0], 0) < need[1]:
                found.append(need)
                join(done, self.at[need][1])
        return found

    def numbered(self) -> list[int]:
        """Give events their numbers, after the caller's, which is 0; returns those that the caller waits for."""
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
    """Insert the program_ops. Event 0 is the caller's; `ends` are those that it waits for."""
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
            for value in orders.lends.get(node, ()):
                graph.call_function(program_ops.lend, (value, handle))
        if node in orders.records:
            with graph.inserting_after(node):
                graph.call_function(program_ops.record, (handle, orders.records[node]))
    with graph.inserting_before(next(n for n in reversed(graph.nodes) if n.op == "output")):
        graph.call_function(program_ops.on_stream, (handle, CALLER))
        for event in ends:
            graph.call_function(program_ops.wait, (handle, event))


def join(clock: StreamClock, other: Mapping[str, int]) -> None:
    for stream, number in other.items():
        clock[stream] = max(clock.get(stream, 0), number)


def nodes_in(argument: Any) -> list[fx.Node]:
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
    """From the first byte to the last, by slot."""
    found: dict[int, SlotRange] = {}
    for view in views:
        own = SlotRange(view.slot, view.offset, view.offset + math.prod(view.shape) * view.dtype.itemsize)
        old = found.get(view.slot, own)
        found[view.slot] = SlotRange(view.slot, min(old.start, own.start), max(old.end, own.end))
    return list(found.values())
