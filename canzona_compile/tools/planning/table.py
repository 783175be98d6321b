"""A forecast on a terminal: reads at 80 columns, without colours and in ASCII too."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from rich.console import ConsoleOptions, Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from canzona_compile.analysis.flops import readable, readable_bytes
from canzona_compile.report.charts import ASCII, MOST_BARS, UNICODE, Glyphs, axis, duration, histogram, plural
from canzona_compile.report.terminal import WIDEST, columns, hanging, heading
from canzona_compile.tools.planning.figures import Forecast, StrategyForecast
from canzona_compile.tools.simulation.figures import COMPUTE, STREAMS, Span

MOST_LANES = 4  # ranks of the timeline
MOST_GROUPS = 12


def table(forecast: Forecast, options: ConsoleOptions) -> Iterator[RenderableType]:
    """The sections of a forecast, top to bottom."""
    glyphs = ASCII if options.ascii_only else UNICODE
    width = min(options.max_width, WIDEST)
    yield headline(forecast, width)
    lanes = "simulated; the busiest and the idlest rank" if len(forecast.simulation.shown) > MOST_LANES else "simulated"
    sections: list[tuple[str, str, Iterable[RenderableType]]] = [
        ("Alternatives", "the same matrices, planned another way", alternatives(forecast, glyphs)),
        ("Load", "FLOPs per rank and step", load(forecast, width - 2, glyphs)),
        ("Timeline", lanes, timeline(forecast, width - 2, glyphs)),
        ("Strategies", "of matrices alike, alone on their ranks", strategies(forecast, glyphs)),
        ("Cost", "of one matrix of m x n: FLOPs, bytes in memory and on the wire", costs(forecast)),
        ("Micro-groups", "bytes that leave a rank, all ranks", groups(forecast)),
        ("Memory", "of the rank that needs most", memory(forecast)),
        ("Rates", f"of {forecast.hardware.name}", rates(forecast)),
        ("Assumptions", "", [hanging(Text(glyphs.dot), text) for text in forecast.assumptions]),
    ]
    for title, caption, body in sections:
        if content := list(body):
            yield Text()
            yield heading(title, caption, width, glyphs)
            yield Padding(Group(*content), (0, 0, 0, 2))


def headline(forecast: Forecast, width: int) -> RenderableType:
    exposed = max((r.exposed for r in forecast.simulation.ranks), default=0.0)
    figures = [
        (duration(forecast.simulation.seconds), "step"),
        (str(forecast.matrices), "matrices"),
        (f"{forecast.imbalance:.2f}", "max / mean load"),
        (duration(exposed), "exposed"),
        (readable_bytes(forecast.memory.buffers), "buffers"),
    ]
    grid = Table.grid(expand=True)
    for _ in figures:
        grid.add_column(justify="center", ratio=1)
    grid.add_row(*(Text(value, "bold") for value, _ in figures))
    grid.add_row(*(Text(name, "dim") for _, name in figures))
    mesh = " ".join(f"{name}={size}" for name, size in forecast.mesh)
    title = Text.assemble(("canzona plan", "bold"), f"  {forecast.optimizer}, {forecast.model} on {mesh}")
    lines: list[RenderableType] = [grid, Text()]
    if forecast.hidden:
        lines.append(Text(f"and {duration(forecast.hidden)} under the next forward pass", "dim", justify="center"))
    if forecast.elementwise:
        words = f"{plural(forecast.elementwise, 'parameter')} updated elementwise, without communication"
        lines.append(Text(words, "dim", justify="center"))
    lines.append(Text(f"plan {forecast.fingerprint[:12]}", "dim", justify="center"))
    return Panel(Group(*lines), title=title, title_align="left", border_style="dim", width=width)


def alternatives(forecast: Forecast, glyphs: Glyphs) -> Iterator[RenderableType]:
    if len(forecast.alternatives) < 2:
        return
    found = columns("", "plan", ">step", ">max/mean", ">exposed", ">wire", ">buffers", ">groups")
    for one in forecast.alternatives:
        mark = glyphs.fills[0] if one.chosen else ""
        cells = (
            one.name,
            duration(one.seconds),
            f"{one.imbalance:.2f}",
            duration(one.exposed) if one.exposed else "-",
            readable_bytes(one.sent),
            readable_bytes(one.peak),
            str(one.groups),
        )
        found.add_row(Text(mark, "green"), *(Text(c, "bold" if one.chosen else "") for c in cells))
    yield found


def load(forecast: Forecast, width: int, glyphs: Glyphs) -> Iterator[RenderableType]:
    loads = forecast.loads
    if not loads:
        return
    most = max(one.flops for one in loads)
    mean = sum(one.flops for one in loads) / len(loads)
    if len(loads) > MOST_BARS:
        yield from histogram(loads, width, glyphs)
    else:
        for one in loads:
            room = max(10, width - 42)
            line = Text(f"rank {one.rank:<5}", no_wrap=True)
            line.append(f"{glyphs.fills[0] * round(room * one.flops / most):<{room}}", "cyan")
            yield line.append(f" {readable(one.flops):>14} {plural(one.tasks, 'matrix', 'matrices'):>13}")
    yield Text(f"mean {readable(mean)}, max {readable(most)}, max/mean {forecast.imbalance:.2f}", "dim")


def timeline(forecast: Forecast, width: int, glyphs: Glyphs) -> Iterator[RenderableType]:
    total, shown = forecast.simulation.seconds, forecast.simulation.shown
    if not total:
        return
    busy = {r.rank: r.compute for r in forecast.simulation.ranks}
    order = sorted(shown, key=lambda rank: (-busy[rank], rank))
    asked = dict(forecast.options).get("rank")
    wanted = [order[0], order[-1], *([int(asked)] if asked is not None else [])]
    lanes = order if len(order) <= MOST_LANES else list(dict.fromkeys(wanted))
    left = len("rank 12345 network ")
    room = max(20, width - left)
    rule, labels = axis(total, room, glyphs)
    yield Text(" " * left + labels, "dim", no_wrap=True)
    yield Text(" " * left + rule, "dim", no_wrap=True)
    for rank in lanes:
        for stream in STREAMS:
            spans = [s for s in forecast.simulation.spans if (s.rank, s.stream) == (rank, stream)]
            if spans or stream == COMPUTE:
                label = f"rank {rank} {stream}"
                line = Text(f"{label:<{left}}", no_wrap=True)
                yield line.append(lane(spans, total, room, glyphs))
    yield Text(f"{glyphs.fills[0]} compute {glyphs.fills[1]} elementwise {glyphs.fills[2]} transfer", "dim")


def lane(spans: list[Span], total: float, room: int, glyphs: Glyphs) -> Text:
    cells = [(glyphs.idle, "dim")] * room
    for span in spans:
        begin = min(room - 1, round(span.start / total * room))
        end = max(begin + 1, round(span.end / total * room))
        kind = 2 if span.stream != COMPUTE else 0 if span.act == "compute" else 1
        cells[begin:end] = [(glyphs.fills[kind], ("cyan", "magenta", "yellow")[kind])] * (min(end, room) - begin)
    text = Text()
    for glyph, style in cells:
        text.append(glyph, style)
    return text


def strategies(forecast: Forecast, glyphs: Glyphs) -> Iterator[RenderableType]:
    for i, template in enumerate(forecast.templates):
        yield Text(f"{template.name}: {plural(template.tasks, 'matrix', 'matrices')}", "bold")
        found = columns("", "strategy", ">seconds", ">compute", ">gather", ">scatter", "why")
        found.show_header = i == 0
        for column, least in zip(found.columns, (1, 11, 7, 7, 7, 7, 16), strict=True):
            column.min_width = least
        found.columns[-1].no_wrap = False
        for one in template.strategies:
            if math.isfinite(one.seconds) or one.chosen:
                found.add_row(*(Text(c, "bold" if one.chosen else "") for c in (mark(one, glyphs), *cells(one))))
        yield found


def mark(one: StrategyForecast, glyphs: Glyphs) -> str:
    return glyphs.fills[0] if one.chosen else ""


def cells(one: StrategyForecast) -> Iterator[str]:
    yield one.name
    for seconds in (one.seconds, one.compute, one.gather, one.scatter):
        yield duration(seconds) if seconds else "-"
    yield one.note if one.runs else f"{one.note} (simulated only)"


def costs(forecast: Forecast) -> Iterator[RenderableType]:
    for template in forecast.templates:
        dims = "x".join(map(str, template.shape))
        head = f"{template.name}: {plural(template.tasks, 'matrix', 'matrices')} of {dims}"
        yield Text(f"{head}, {duration(template.seconds)} each", "bold")
        for what, formula, value in (
            ("FLOPs", template.flops, readable(template.flops_value)),
            ("memory", template.memory, readable_bytes(template.memory_value)),
            ("wire", template.wire, readable_bytes(template.wire_value)),
        ):
            yield Text(f"  {what:<7}{pretty(formula)} = {value}")


def pretty(formula: str) -> str:
    return formula.replace("**", "^").replace("*", " ")


def groups(forecast: Forecast) -> Iterator[RenderableType]:
    if not forecast.groups:
        return
    found = columns(">#", "grid", ">matrices", ">gather", ">scatter", ">exchange", ">busiest owner")
    for group in forecast.groups[:MOST_GROUPS]:
        sizes = (group.gather_bytes, group.scatter_bytes, group.exchange_bytes)
        found.add_row(
            str(group.index),
            f"{group.replicas}x{group.shards}",
            str(group.tasks),
            *(readable_bytes(n) if n else "-" for n in sizes),
            readable(group.makespan_flops),
        )
    yield found
    if (more := len(forecast.groups) - MOST_GROUPS) > 0:
        yield Text(f"and {more} more", "dim")


def memory(forecast: Forecast) -> Iterator[RenderableType]:
    own = forecast.memory
    yield Text(f"buffers {readable_bytes(own.buffers)}, in one micro-group {readable_bytes(own.one_group)}")
    kept = f"optimizer state {readable_bytes(own.state)}"
    yield Text(f"{kept}, kept whole on every rank {readable_bytes(own.state_replicated)}")


def rates(forecast: Forecast) -> Iterator[RenderableType]:
    own = forecast.hardware
    sources = dict(own.sources)
    for name, value in (
        ("products", ", ".join(f"{d} {readable(c.best)}/s" for d, c in own.products)),
        ("factorizations", ", ".join(f"{d} {readable(c.best)}/s" for d, c in own.factorizations)),
        ("bandwidth", f"{own.bandwidth / 1e9:g} GB/s"),
        ("launch", duration(own.launch) if own.launch else "0"),
        ("node", f"{own.node.bandwidth / 1e9:g} GB/s, {duration(own.node.latency)} an exchange"),
        ("network", f"{own.network.bandwidth / 1e9:g} GB/s, {duration(own.network.latency)} an exchange"),
    ):
        known = "measured" if name in own.measured else "assumed"
        source = sources.get(name, "no source given")
        said = source if source.startswith(known) else f"{known}: {source}"
        yield Text.assemble((f"{name} ", "bold"), value, (f"  {said}", "dim"))
