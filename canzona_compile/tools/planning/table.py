"""Lays out a forecast for a terminal."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from canzona_compile.choice.rows import format_count
from canzona_compile.machine.hardware import Curve, Hardware, Link
from canzona_compile.report.charts import FILLS, event, load_chart, timeline
from canzona_compile.report.measured_table import measured_caption, measured_table
from canzona_compile.report.sections import (
    MicroGroupRow,
    Section,
    bullets,
    columns,
    formula_text,
    headline_panel,
    listing,
    micro_group_table,
    page,
)
from canzona_compile.report.units import (
    format_bandwidth,
    format_bytes,
    format_flops,
    format_seconds,
    format_shape,
    plural,
)
from canzona_compile.simulation.figures import COMPUTE, STREAMS
from canzona_compile.tools.planning.figures import Forecast
from canzona_compile.tools.planning.zero1_table import PLANS, phases, plans

MOST_LANES = 4  # ranks of the timeline


def table(forecast: Forecast) -> RenderableType:
    """Lay out a forecast.

    Args:
        forecast: the figures of a plan made offline.

    Returns:
        Its sections, top to bottom, for a console of any width and encoding.
    """
    some_ranks = "; the busiest and the idlest rank" if len(forecast.simulation.shown) > MOST_LANES else ""
    return page(
        headline(forecast),
        (
            Section("Alternatives", "the same matrices, planned another way", alternatives(forecast)),
            Section(
                "Iteration",
                "backward, step, next forward pass, simulated; their numbers are buckets",
                phases(forecast),
            ),
            Section("Measured", measured_caption(forecast.measured), measured_table(forecast.measured)),
            Section("Load", "FLOPs of each rank per step", load_chart(forecast.loads, forecast.imbalance)),
            Section("Timeline", f"simulated{some_ranks}", simulated(forecast)),
            Section("Strategies", "of each template's matrices, alone on their ranks", strategies(forecast)),
            Section("Cost", "of one matrix of m x n: FLOPs, bytes in memory and on the wire", costs(forecast)),
            Section("Micro-groups", "bytes that leave a rank, summed over all ranks", micro_groups(forecast)),
            Section("Memory", "bytes on the rank that needs most", memory(forecast)),
            Section("Without communication", "parameters that each rank updates by itself", local(forecast)),
            Section("Rates", f"of {forecast.hardware.name}", rates(forecast.hardware)),
            Section("Assumptions", "", bullets(forecast.assumptions)),
        ),
    )


def headline(forecast: Forecast) -> Panel:
    """Frame the plan's main figures."""
    exposed = max((r.exposed for r in forecast.simulation.ranks), default=0.0)
    period = forecast.period
    steps = [(format_seconds(forecast.simulation.seconds), "predicted\nstep")]
    if period is not None:
        steps = [
            (format_seconds(period.mean), f"mean of\n{plural(len(period.seconds), 'step')}"),
            (format_seconds(period.worst), "heaviest\nstep"),
        ]
    figures = (
        *steps,
        (str(forecast.matrices), "matrices"),
        (f"{forecast.imbalance:.2f}", "max / mean\nload"),
        (format_seconds(exposed), "exposed\ncommunication"),
        (format_bytes(forecast.memory.buffers), "buffers\nper rank"),
    )
    how = "by the owners of their slices" if forecast.zero1 else "without communication"
    remarks = (
        "steps are predicted; below, and beside them, is the heaviest one" if period is not None else "",
        beside(forecast),
        f"{plural(forecast.elementwise, 'parameter')} updated elementwise, {how}" if forecast.elementwise else "",
        f"plan {forecast.fingerprint[:12]}",
    )
    mesh = " ".join(f"{name}={size}" for name, size in forecast.mesh)
    title = Text.assemble(("canzona plan", "bold"), f"  {forecast.optimizer}, {forecast.model} on {mesh}")
    return headline_panel(title, [(Text(value, "bold"), name) for value, name in figures], remarks)


def beside(forecast: Forecast) -> str:
    """Say what communication costs before and after the step; nothing without ZeRO-1."""
    if forecast.zero1 is None:
        return ""
    found = [f"{format_seconds(p.exposed)} in {p.name}" for p in forecast.zero1.phases if p.name != "step"]
    return f"exposed beside the step: {' and '.join(found)}"


def alternatives(forecast: Forecast) -> Iterator[RenderableType]:
    """Compare the plan with others, if the user asked for others."""
    if len(forecast.alternatives) < 2:
        return
    if forecast.zero1 is not None:
        first, *others = PLANS
        table = columns("", first, *(f">{name}" for name in others))
        for chosen, cells in plans(forecast.alternatives):
            choice(table, chosen, *cells)
        yield table
        return
    step = ">step" if forecast.period is None else ">heaviest step"
    table = columns("", "plan", step, ">max/mean", ">exposed", ">wire", ">buffers", ">micro-groups")
    for one in forecast.alternatives:
        choice(
            table,
            one.chosen,
            one.name,
            format_seconds(one.seconds),
            f"{one.imbalance:.2f}",
            format_seconds(one.exposed) if one.exposed else "-",
            format_bytes(one.sent),
            format_bytes(one.peak),
            str(one.groups),
        )
    yield table


def simulated(forecast: Forecast) -> Iterator[RenderableType]:
    """Draw the simulated step of a few ranks: of all whose spans were kept, or of the most telling ones."""
    simulation = forecast.simulation
    if not simulation.seconds:
        return
    busy = {r.rank: r.compute for r in simulation.ranks}
    ranks = sorted(simulation.shown, key=lambda rank: (-busy[rank], rank))
    if len(ranks) > MOST_LANES:
        asked = dict(forecast.options).get("rank")
        ranks = list(dict.fromkeys([ranks[0], ranks[-1], *([int(asked)] if asked is not None else [])]))
    lanes = []
    for rank in ranks:
        for stream in STREAMS:
            spans = [s for s in simulation.spans if (s.rank, s.stream) == (rank, stream)]
            if spans or stream == COMPUTE:
                drawn = [event(s.act, stream, s.group, s.start, s.end) for s in spans]
                lanes.append((f"rank {rank} {stream}", drawn))
    yield timeline(simulation.seconds, lanes)


def strategies(forecast: Forecast) -> Iterator[RenderableType]:
    """Compare, for each template, the strategies that its matrices can have."""
    for i, template in enumerate(forecast.templates):
        yield Text(f"{template.name}: {plural(template.tasks, 'matrix', 'matrices')}", "bold")
        table = columns("", "strategy", ">time", ">compute", ">gather", ">scatter", "why")
        table.show_header = i == 0
        for column, width in zip(table.columns, (1, 11, 7, 7, 7, 7, 16), strict=True):
            column.min_width = width  # so that the tables of all templates align
        table.columns[-1].no_wrap = False
        for one in template.strategies:
            if math.isfinite(one.seconds) or one.chosen:
                parts = (one.seconds, one.compute, one.gather, one.scatter)
                seconds = [format_seconds(part) if part else "-" for part in parts]
                choice(table, one.chosen, one.name, *seconds, one.note if one.runs else f"{one.note} (simulated only)")
        yield table


def choice(table: Table, chosen: bool, *cells: str) -> None:
    """Add a row. A mark and bold letters show the strategy that the plan takes."""
    table.add_row(Text(FILLS[0] if chosen else "", "green"), *(Text(cell, "bold" if chosen else "") for cell in cells))


def costs(forecast: Forecast) -> Iterator[RenderableType]:
    """Write the cost of one matrix of each template, as formulas and as numbers."""
    for template in forecast.templates:
        count = plural(template.tasks, "matrix", "matrices")
        words = f"{template.name}: {count} of {format_shape(template.shape)}, {format_seconds(template.seconds)} each"
        yield Text(words, "bold")
        for what, formula, value in (
            ("FLOPs", template.flops, format_flops(template.flops_value)),
            ("memory", template.memory, format_bytes(template.memory_value)),
            ("wire", template.wire, format_bytes(template.wire_value)),
        ):
            yield Text(f"  {what:<7}{formula_text(formula)} = {value}")


def micro_groups(forecast: Forecast) -> list[RenderableType]:
    """List the micro-groups."""
    return micro_group_table(
        [
            MicroGroupRow(
                g.index,
                f"{g.replicas}x{g.shards}",
                g.tasks,
                (g.gather_bytes, g.scatter_bytes, g.exchange_bytes),
                g.makespan_flops,
            )
            for g in forecast.groups
        ]
    )


def memory(forecast: Forecast) -> Iterator[RenderableType]:
    """Compare the bytes of the plan with those of simpler ones."""
    own = forecast.memory
    yield Text(f"buffers {format_bytes(own.buffers)}, in one micro-group {format_bytes(own.one_group)}")
    kept = f"optimizer state {format_bytes(own.state)}"
    yield Text(f"{kept}, kept whole on every rank {format_bytes(own.state_replicated)}")


def local(forecast: Forecast) -> Iterator[RenderableType]:
    """Sum up the elementwise updates of a chain."""
    if (own := forecast.local) is None:
        return
    all_of_them = f"{plural(own.parameters, 'parameter')}, {format_count(own.elements)} elements"
    yield Text(f"{' and '.join(own.optimizers)}: {all_of_them}")
    yield Text(
        f"on the rank with most: {format_count(own.most)} elements, state {format_bytes(own.state)}, "
        f"{format_seconds(own.seconds)} after the matrices, which the predicted step leaves out"
    )


def rates(hardware: Hardware) -> Iterator[RenderableType]:
    """List the rates that the predictions assume, and their sources."""
    sources = dict(hardware.sources)
    values = {
        "products": per_dtype(hardware.products),
        "factorizations": per_dtype(hardware.factorizations),
        "bandwidth": format_bandwidth(hardware.bandwidth),
        "launch": format_seconds(hardware.launch) if hardware.launch else "0",
        "node": per_exchange(hardware.node),
        "network": per_exchange(hardware.network),
    }
    rows = []
    for name, value in values.items():
        known = "measured" if name in hardware.measured else "assumed"
        source = sources.get(name, "no source given")
        said = source if source.startswith(known) else f"{known}: {source}"
        rows.append((Text(name, "bold"), Text.assemble(value, (f"  {said}", "dim"))))
    yield listing(rows)


def per_exchange(link: Link) -> str:
    """Write the rates of a link."""
    return f"{format_bandwidth(link.bandwidth)}, {format_seconds(link.latency)} an exchange"


def per_dtype(curves: Sequence[tuple[str, Curve]]) -> str:
    """Write the best rate of each dtype, or of each kind of factorization."""
    return ", ".join(f"{name} {format_flops(curve.best)}/s" for name, curve in curves)
