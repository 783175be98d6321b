"""A forecast as a trace in the Trace Event Format, which ui.perfetto.dev and chrome://tracing open.

The trace has a process per rank and a thread per stream. Arrows join the transfers of one collective, and a counter
shows the buffers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import count, groupby
from operator import attrgetter
from typing import Any

from canzona_compile.machine.hardware import Hardware
from canzona_compile.report.sections import rows_without_overlap
from canzona_compile.simulation.engine import COMPUTE, NETWORK, NODE, STREAMS, Memory, Simulation, Span
from canzona_compile.tools.planning.figures import Forecast

SCHEMA = 1
MOST_NAMES = 100  # how many names a span lists; the rest is a number
MOST_ARROWS = 16  # of one collective
TRACKS = 100  # how many threads a stream may take, so that a thread id tells the stream
TITLES = {COMPUTE: "compute", NODE: "links within the node", NETWORK: "links to other nodes"}

TraceEvent = dict[str, Any]


def trace(forecast: Forecast) -> dict[str, Any]:
    """Return the simulated step as the object form of a trace: `json.dump` it to a file."""
    simulation, hardware = forecast.simulation, forecast.hardware
    rows = tracks(simulation.spans)
    timed = [*spans(simulation, rows), *arrows(simulation, rows), *buffers(simulation)]
    # A stable sort: an arrow must come after the span that it starts in.
    timed.sort(key=lambda event: event["ts"])
    return {
        "traceEvents": [*names(simulation, hardware, rows), *timed],
        "displayTimeUnit": "ms" if simulation.seconds >= 1e-3 else "ns",
        "otherData": {
            "schema": SCHEMA,
            "fingerprint": forecast.fingerprint,
            "model": forecast.model,
            "optimizer": forecast.optimizer,
            "ranks": len(simulation.ranks),
            "hardware": hardware.name,
            "assumed_rates": list(hardware.assumed),
            "seconds": simulation.seconds,
            "shown": list(simulation.shown),
        },
    }


def tracks(spans: Sequence[Span]) -> list[int]:
    """Give each span a row of its stream: nearly always 0.

    If communication takes the processors, a rank may move parts of two collectives at once.
    """
    found = [0] * len(spans)
    streams: dict[tuple[int, str], list[int]] = defaultdict(list)
    for i, span in enumerate(spans):
        streams[span.rank, span.stream].append(i)
    for own in streams.values():
        for i, row in zip(own, rows_without_overlap([(spans[i].start, spans[i].end) for i in own]), strict=True):
            found[i] = row
    return found


def names(simulation: Simulation, hardware: Hardware, rows: Sequence[int]) -> Iterator[TraceEvent]:
    """Name the processes and threads, and order them."""
    used = {(s.rank, thread(s, row)): s.stream for s, row in zip(simulation.spans, rows, strict=True)}
    for rank in simulation.shown:
        yield named(rank, 0, "process_name", name=f"rank {rank}")
        yield named(rank, 0, "process_sort_index", sort_index=rank)
        yield named(rank, 0, "process_labels", labels=f"node {rank // hardware.ranks_per_node}")
    for (rank, tid), stream in sorted(used.items()):
        yield named(rank, tid, "thread_name", name=TITLES[stream])
        yield named(rank, tid, "thread_sort_index", sort_index=tid)


def named(pid: int, tid: int, what: str, /, **args: object) -> TraceEvent:
    return {"ph": "M", "pid": pid, "tid": tid, "name": what, "args": args}


def thread(span: Span, row: int) -> int:
    return 1 + TRACKS * STREAMS.index(span.stream) + row


def title(span: Span) -> str:
    """The act and the micro-group, if it is of one."""
    return f"{span.act.removeprefix('start ')} {span.group if span.group >= 0 else ''}".rstrip()


def micro(seconds: float) -> float:
    return round(seconds * 1e6, 6)  # to a picosecond


def spans(simulation: Simulation, rows: Sequence[int]) -> Iterator[TraceEvent]:
    """Write each span as a complete event."""
    for span, row in zip(simulation.spans, rows, strict=True):
        args: dict[str, Any] = {"micro-group": span.group}
        if span.tasks:
            args["matrices"] = list(span.tasks[:MOST_NAMES])
        if len(span.tasks) > MOST_NAMES:
            args["more matrices"] = len(span.tasks) - MOST_NAMES
        if span.flow >= 0:
            args |= {"bytes": span.bytes, "collective": span.flow}
        start = micro(span.start)
        yield {
            "ph": "X",
            "pid": span.rank,
            "tid": thread(span, row),
            "ts": start,
            "dur": max(0.0, round(micro(span.end) - start, 6)),
            "name": title(span),
            "cat": "computation" if span.stream == COMPUTE else "communication",
            "args": args,
        }


def arrows(simulation: Simulation, rows: Sequence[int]) -> Iterator[TraceEvent]:
    """Draw arrows from the earliest span of a collective (on the lowest such rank) to one span of each other rank.

    Each arrow has its own number, because viewers join all spans with the same number in a chain.
    """
    numbers = count(1)
    taking = [(s, row) for s, row in zip(simulation.spans, rows, strict=True) if s.flow >= 0 and s.end > s.start]
    taking.sort(key=lambda pair: (pair[0].flow, pair[0].start, pair[0].rank))
    for _, members in groupby(taking, key=lambda pair: pair[0].flow):
        (first, row), *rest = members
        others: dict[int, tuple[Span, int]] = {}
        for pair in rest:
            if pair[0].rank != first.rank:
                others.setdefault(pair[0].rank, pair)
        for other, other_row in list(others.values())[:MOST_ARROWS]:
            number, name = next(numbers), title(first)
            yield arrow("s", number, name, first, row)
            yield arrow("f", number, name, other, other_row) | {"bp": "e"}


def arrow(phase: str, number: int, name: str, span: Span, row: int) -> TraceEvent:
    where = {"pid": span.rank, "tid": thread(span, row), "ts": micro(span.start)}
    return {"ph": phase, "id": number, **where, "name": name, "cat": "collective"}


def buffers(simulation: Simulation) -> Iterator[TraceEvent]:
    """Write a counter per rank: the bytes in its buffers, which are 0 before and after the step."""
    ordered = sorted(simulation.memory, key=attrgetter("rank", "at"))
    for rank, moments in groupby(ordered, key=attrgetter("rank")):
        yield counter(Memory(rank, 0.0, 0))
        for moment in moments:
            yield counter(moment)
        yield counter(Memory(rank, simulation.seconds, 0))


def counter(moment: Memory) -> TraceEvent:
    return {"ph": "C", "pid": moment.rank, "ts": micro(moment.at), "name": "buffers", "args": {"bytes": moment.bytes}}
