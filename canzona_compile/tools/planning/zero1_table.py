"""Lays out the part of a forecast that ZeRO-1 adds: buckets, phases, and how planners compare."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.text import Text

from canzona_compile.report.charts import event, timeline
from canzona_compile.report.sections import columns
from canzona_compile.report.units import format_bytes, format_flops, format_seconds, plural
from canzona_compile.simulation.figures import STREAMS
from canzona_compile.tools.planning.figures import Alternative, Forecast, Zero1Forecast

PHASES = ("phase", "time", "exposed", "data-parallel traffic", "collectives")
PLANS = ("plan", "step", "max/mean", "makespan", "padding", "traffic", "exposed", "buffers")


def phase_rows(zero1: Zero1Forecast) -> Iterator[tuple[str, ...]]:
    """The cells of PHASES for each phase."""
    for one in zero1.phases:
        exposed = format_seconds(one.exposed) if one.exposed else "-"
        yield one.name, format_seconds(one.seconds), exposed, format_bytes(one.sent), str(one.collectives)


def plan_cells(one: Alternative) -> tuple[str, ...]:
    """The cells of PLANS for a plan; "-" where a plan has no buckets."""
    own = one.zero1
    told = ("-",) * 4
    if own is not None:
        told = (format_flops(own.makespan), padding_text(own), format_bytes(own.sent), format_seconds(own.exposed))
    return (one.name, format_seconds(one.seconds), f"{one.imbalance:.2f}", *told, format_bytes(one.peak))


def padding_text(zero1: Zero1Forecast) -> str:
    return f"{zero1.padding_share:.2%}"


def buckets_text(zero1: Zero1Forecast) -> str:
    """Say in words how many buckets there are, and what padding adds."""
    uneven = zero1.buckets - zero1.uniform
    return (
        f"{plural(zero1.buckets, 'bucket')}, {zero1.uniform} of equal and {uneven} of unequal shards; "
        f"{zero1.elements} elements and {zero1.padding} of padding, {padding_text(zero1)}"
    )


def phases(forecast: Forecast) -> Iterator[RenderableType]:
    """List the phases of an iteration, and draw what one rank does in the passes of the model."""
    zero1 = forecast.zero1
    if zero1 is None:
        return
    yield Text(buckets_text(zero1))
    first, *others = PHASES
    table = columns(first, *(f">{name}" for name in others))
    for row in phase_rows(zero1):
        table.add_row(*map(Text, row))
    yield table
    for one in zero1.phases:
        if not (one.spans and one.seconds):
            continue
        lanes = []
        for stream in STREAMS:
            spans = [s for s in one.spans if s.stream == stream]
            if spans:
                drawn = [event(act_of(s.act, one.name), stream, s.group, s.start, s.end) for s in spans]
                lanes.append((f"{one.name} {stream}", drawn))
        yield timeline(one.seconds, lanes)


def act_of(act: str, name: str) -> str:
    """The act as a timeline knows it: a pass computes, between copies."""
    return "compute" if act == name else act


def plans(alternatives: Sequence[Alternative]) -> Iterator[tuple[bool, tuple[str, ...]]]:
    """The rows of PLANS, and which of them is the plan."""
    for one in alternatives:
        yield one.chosen, plan_cells(one)
