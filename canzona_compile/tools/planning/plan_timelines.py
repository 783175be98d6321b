"""When what happens by a plan, on a page: the simulated step of some ranks, and the phases of an iteration."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from canzona_compile.report.page import (
    Bar,
    Bars,
    Block,
    Detail,
    Lane,
    PageTable,
    Section,
    Timeline,
    TimelineEvent,
    note,
)
from canzona_compile.report.sections import event
from canzona_compile.report.units import format_bytes, plural
from canzona_compile.simulation.figures import COMPUTE, NETWORK, NODE, STREAMS, Memory, Span
from canzona_compile.tools.planning.figures import Forecast, Zero1Forecast

MOST_RANKS = 4  # whose lanes are drawn where there is little room
STREAM_WORDS = {COMPUTE: "processor", NODE: "links within the node", NETWORK: "links to other nodes"}


def iteration(zero1: Zero1Forecast) -> Iterator[Block]:
    """List the phases of an iteration, and draw what one rank does in the passes of the model."""
    yield note(buckets_text(zero1))
    yield phases(zero1)
    for phase in zero1.phases:
        if not (phase.spans and phase.seconds):
            continue
        lanes = tuple(
            Lane(phase.name, stream, tuple(event(act(s, phase.name), stream, s.group, s.start, s.end) for s in own))
            for stream in STREAMS
            if (own := [s for s in phase.spans if s.stream == stream])
        )
        yield Timeline(f"What a rank does in {phase.name}", phase.seconds, lanes, "micro-group")


def act(span: Span, phase: str) -> str:
    """The act as a timeline knows it: a pass computes, between copies."""
    return COMPUTE if span.act == phase else span.act


def buckets_text(zero1: Zero1Forecast) -> str:
    """Say how many buckets there are, and what padding adds."""
    uneven = zero1.buckets - zero1.uniform
    return (
        f"{plural(zero1.buckets, 'bucket')}, {zero1.uniform} of equal and {uneven} of unequal shards; "
        f"{zero1.elements} elements and {zero1.padding} of padding, {zero1.padding_share:.2%}"
    )


def phases(zero1: Zero1Forecast) -> PageTable:
    """A row per phase of an iteration."""
    headers = ("phase", "time:s", "exposed:s", "data-parallel traffic:B", "collectives:n")
    rows = tuple((own.name, own.seconds, own.exposed or None, own.sent, own.collectives) for own in zero1.phases)
    return PageTable(headers, rows, "Phases")


def times(forecast: Forecast) -> Iterator[Block]:
    """Draw what every rank has beside FLOPs, where there is room."""
    waits = (("computes", "compute"), ("waits for a transfer", "gather"), ("waits for other ranks", "wait"))
    charts: tuple[tuple[str, str, str, tuple[tuple[str, str], ...], tuple[str, ...]], ...] = (
        ("Time", "where the step goes on each rank", "s", waits, ("compute", "exposed", "bubble")),
        ("Buffers", "most bytes of buffers at any time", "B", (("", "buffers"),), ("peak",)),
        ("Sent", "bytes sent to other ranks in a step", "B", (("", "gather"),), ("sent",)),
    )
    for title, caption, unit, parts, fields in charts if forecast.simulation.ranks else ():
        found = (Bar(r.rank, tuple(getattr(r, name) for name in fields)) for r in forecast.simulation.ranks)
        drawn = Bars(f"{title} per rank", unit, parts, tuple(found), of="rank")
        yield Detail((Section(title, (drawn,), caption),))


def timelines(forecast: Forecast) -> Iterator[Block]:
    """Draw the simulated step of all ranks whose spans were kept; where there is little room, of the most telling."""
    simulation = forecast.simulation
    if not simulation.seconds:
        return
    busy = {r.rank: r.compute for r in simulation.ranks}
    ranks = sorted(simulation.shown, key=lambda rank: (-busy[rank], rank))
    asked = [int(value) for name, value in forecast.options if name == "rank"]
    telling = ranks if len(ranks) <= MOST_RANKS else list(dict.fromkeys([ranks[0], ranks[-1], *asked]))
    members: dict[int, set[int]] = defaultdict(set)
    for span in simulation.spans:
        members[span.flow].add(span.rank)
    lanes = []
    for rank in dict.fromkeys([*telling, *ranks]):
        for stream in STREAMS:
            spans = [s for s in simulation.spans if (s.rank, s.stream) == (rank, stream)]
            if spans or stream == COMPUTE:
                events = tuple(described(span, len(members[span.flow])) for span in spans)
                lanes.append(Lane(f"rank {rank}", stream, events, detail=rank not in telling))
        moments = [m for m in simulation.memory if m.rank == rank]
        if moments:
            most = max(m.bytes for m in simulation.memory)
            lanes.append(Lane(f"rank {rank}", "buffers", tuple(held(moments, simulation.seconds, most)), detail=True))
    yield Detail((note(f"{len(ranks)} of {plural(len(simulation.ranks), 'rank')}, in one step"),))
    yield Timeline("What each rank does when", simulation.seconds, tuple(lanes), "micro-group")


def described(span: Span, members: int) -> TimelineEvent:
    """An event with all that is known of its span, and how many ranks that are shown take part in its collective."""
    drawn = event(span.act, span.stream, span.group, span.start, span.end)
    title = f"{span.act.removeprefix('start ')}, micro-group {span.group}"
    remarks = [f"rank {span.rank}, {STREAM_WORDS[span.stream]}"]
    if span.flow >= 0:
        taking = f"{plural(members, 'rank')} of those shown"
        remarks += [f"sends {format_bytes(span.bytes)}", f"collective {span.flow}, {taking}"]
    return TimelineEvent(drawn.begin, drawn.end, drawn.kind, drawn.number, title, tuple(remarks), span.tasks)


def held(moments: Sequence[Memory], seconds: float, most: int) -> Iterator[TimelineEvent]:
    """Show the bytes that a rank holds from each moment to its next, as a share of `most`."""
    ends = [*(moment.at for moment in moments[1:]), seconds]
    for own, end in zip(moments, ends, strict=True):
        if own.bytes and end > own.at:
            title = f"buffers of rank {own.rank}"
            yield TimelineEvent(
                own.at, end, "buffers", 0, title, (f"holds {format_bytes(own.bytes)}",), (), own.bytes / most
            )
