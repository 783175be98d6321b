"""The charts of a forecast's page, as plotly figures.

Parameters are called what users like, and plotly reads a little markup in texts: every name that reaches a figure goes
through `literal`.
"""

from __future__ import annotations

import html
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from canzona_compile.analysis.flops import readable, readable_bytes
from canzona_compile.report.charts import duration, plural
from canzona_compile.tools.planning.figures import Forecast, TemplateForecast
from canzona_compile.tools.planning.trace import tracks
from canzona_compile.tools.simulation.figures import COMPUTE, NETWORK, NODE, STREAMS, Memory, Simulation, Span

MOST_BARS = 64  # ranks with a bar of their own, cut by micro-group; more make an area
MOST_NAMES = 8  # of matrices beside the pointer; a click lists all
MOST_GROUPS = 12  # micro-groups of a rank beside the pointer
MOST_DRAWN = 2500  # bars in one chart of the timeline
LANE = 15  # pixels
BUFFERS = "buffers"
LONGEST = 5  # times the shortest bar: what is longer leaves the chart, so that the shortest stays visible

# Okabe and Ito's hues, which colour-blind people tell apart, in shades that read on light and dark.
BLUE, PALE, ORANGE, GREEN, PINK, GREY = "#2a86c0", "#86bfe2", "#e39a1f", "#1fa37b", "#c76dab", "#969ca6"
KINDS = {
    "compute": ("computes matrices", BLUE),
    "elementwise": ("prepares, applies", PALE),
    "gather": ("gathers", ORANGE),
    "scatter": ("scatters", GREEN),
    "exchange": ("exchanges", PINK),
    "other": ("other", GREY),
}
STREAM_WORDS = {COMPUTE: "processor", NODE: "links within the node", NETWORK: "links to other nodes"}

Lane = tuple[int, str, int]  # rank, one of STREAMS or BUFFERS, row of it: more than one where spans overlap


def charts(forecast: Forecast) -> dict[str, go.Figure]:
    """Every figure, by the id of the element that shows it; what would be empty is left out."""
    found = {f"timeline-{i}": figure for i, figure in enumerate(timelines(forecast.simulation))}
    found |= {f"load-{metric.name}": per_rank(metric) for metric in metrics(forecast)}
    if forecast.alternatives:
        found["comparison-chart"] = comparison(forecast)
    memory = forecast.memory
    found["memory-buffers"] = pair("one micro-group", memory.buffers, memory.one_group)
    found["memory-state"] = pair("whole on all ranks", memory.state, memory.state_replicated)
    found |= {f"template-{i}": strategies(template) for i, template in enumerate(forecast.templates)}
    return found


def themes() -> dict[str, go.layout.Template]:
    """How figures look on a light and on a dark page."""

    def theme(ink: str, line: str, card: str) -> go.layout.Template:
        clear, axis = "rgba(0,0,0,0)", {"gridcolor": line, "zerolinecolor": line, "linecolor": line}
        return go.layout.Template(
            layout={
                "paper_bgcolor": clear,
                "plot_bgcolor": clear,
                "font": {"color": ink, "size": 12, "family": "system-ui, sans-serif"},
                "xaxis": axis,
                "yaxis": axis,
                "shapedefaults": {"line": {"color": ink}},
                "hoverlabel": {"bgcolor": card, "bordercolor": line, "font": {"color": ink}, "align": "left"},
                "modebar": {"bgcolor": clear, "color": ink, "activecolor": BLUE},
            }
        )

    return {"light": theme("#3a424d", "#dedbd4", "#ffffff"), "dark": theme("#c9ccd1", "#3a4049", "#22262c")}


# -- text --------------------------------------------------------------------------------------


def literal(text: str, most: int = 10**6) -> str:
    """Text that plotly shows as it stands, its middle left out where it has more than `most` characters."""
    half = most // 2
    return html.escape(text if len(text) <= most else f"{text[:half]}…{text[-half:]}", quote=False)


def period(seconds: float) -> str:
    """Seconds in words: 4.9 ms, 0, or impossible where they are infinite."""
    if not math.isfinite(seconds):
        return "impossible"
    return duration(seconds).replace("us", "µs") if seconds else "0"


def share(part: float, whole: float) -> str:
    """3.6%."""
    return f"{100 * part / whole:.3g}%" if whole else "0%"


def said(title: str, lines: Sequence[str]) -> str:
    """What stands beside the pointer."""
    return "<br>".join([f"<b>{title}</b>", *lines])


# -- the timeline ------------------------------------------------------------------------------


def timelines(simulation: Simulation) -> Iterator[go.Figure]:
    """Charts of the ranks that are shown, as many ranks in each as a browser draws without delay."""
    if not simulation.spans or simulation.seconds <= 0:
        return
    size = Counter(span.rank for span in simulation.spans) + Counter(moment.rank for moment in simulation.memory)
    parts: list[list[int]] = [[]]
    for rank in simulation.shown:
        if parts[-1] and sum(size[r] for r in (*parts[-1], rank)) > MOST_DRAWN:
            parts.append([])
        parts[-1].append(rank)
    for ranks in parts:
        yield timeline(simulation, ranks)


def timeline(simulation: Simulation, ranks: Sequence[int]) -> go.Figure:
    """A lane per stream of each of some ranks, and one with its buffers.

    A bar's `customdata` is its place among the `task_lists` of the simulation, -1 where it computes no matrices.
    """
    spans = [span for span in simulation.spans if span.rank in ranks]
    moments = [moment for moment in simulation.memory if moment.rank in ranks]
    rows = tracks(spans)
    lanes = lanes_of(ranks, spans, rows, moments)
    list_number = {tasks: i for i, tasks in enumerate(task_lists(simulation))}
    members: dict[int, set[int]] = defaultdict(set)
    for span in simulation.spans:
        members[span.flow].add(span.rank)
    kinds: dict[str, list[tuple[Span, int]]] = defaultdict(list)
    for span, row in zip(spans, rows, strict=True):
        kinds[kind_of(span.act)].append((span, row))
    figure = go.Figure()
    for kind in sorted(kinds, key=list(KINDS).index):
        words, colour = KINDS[kind]
        figure.add_bar(
            name=words,
            base=[round(span.start, 12) for span, _ in kinds[kind]],  # to a picosecond, to save space
            x=[round(span.end - span.start, 12) for span, _ in kinds[kind]],
            y=[lanes[span.rank, span.stream, row] for span, row in kinds[kind]],
            width=0.8,
            marker={"color": colour, "line": {"color": colour, "width": 0.5}},  # a line, so that short spans are seen
            hovertext=[describe(span, simulation.seconds, len(members[span.flow])) for span, _ in kinds[kind]],
            customdata=[list_number.get(span.tasks, -1) for span, _ in kinds[kind]],
        )
    if moments:
        most = max(moment.bytes for moment in simulation.memory)
        add_buffers(figure, moments, lanes, simulation.seconds, most)
    figure.update_traces(orientation="h", hovertemplate="%{hovertext}<extra></extra>", textposition="none")
    label = {lane: name if row == 0 else "" for (_, name, row), lane in lanes.items()}
    label |= {lanes[rank, COMPUTE, 0]: f"<b>rank {rank}</b> {COMPUTE}" for rank in ranks}
    last = max(lanes.values())
    height = LANE * last + 80
    figure.update_xaxes(
        tickformat="~s",
        ticksuffix="s",
        side="top",
        range=[0, simulation.seconds],
        minallowed=0,
        maxallowed=simulation.seconds,
        rangeslider={"thickness": 36 / height},
    )
    figure.update_yaxes(tickvals=list(label), ticktext=list(label.values()), range=[last + 0.7, -0.7], fixedrange=True)
    figure.update_yaxes(showgrid=False, zeroline=False, tickfont_size=10)
    return finished(figure, round(height), barmode="overlay")


def lanes_of(
    ranks: Sequence[int], spans: Sequence[Span], rows: Sequence[int], moments: Sequence[Memory]
) -> dict[Lane, float]:
    """Where lanes lie, from the top; between ranks there is a gap."""
    used = {(span.rank, span.stream, row) for span, row in zip(spans, rows, strict=True)}
    used |= {(rank, COMPUTE, 0) for rank in ranks}
    used |= {(moment.rank, BUFFERS, 0) for moment in moments}
    order = (*STREAMS, BUFFERS)
    ordered = sorted(used, key=lambda lane: (ranks.index(lane[0]), order.index(lane[1]), lane[2]))
    return {lane: i + 0.6 * ranks.index(lane[0]) for i, lane in enumerate(ordered)}


def kind_of(act: str) -> str:
    """Which of KINDS an act of the schedule is."""
    if act in ("prepare", "apply"):
        return "elementwise"
    return next((kind for kind in KINDS if act.endswith(kind)), "other")


def task_lists(simulation: Simulation) -> list[tuple[str, ...]]:
    """The different lists of matrices that spans compute."""
    return list(dict.fromkeys(span.tasks for span in simulation.spans if span.tasks))


def describe(span: Span, total: float, members: int) -> str:
    length = span.end - span.start
    lines = [
        f"rank {span.rank}, {STREAM_WORDS[span.stream]}",
        f"{period(span.start)} to {period(span.end)}",
        f"lasts {period(length)}, {share(length, total)} of the step",
    ]
    if span.flow >= 0:
        lines.append(f"sends {readable_bytes(span.bytes)}")
        lines.append(f"collective {span.flow}, {plural(members, 'rank')} of those shown")
    lines += [literal(name, 44) for name in span.tasks[:MOST_NAMES]]
    if len(span.tasks) > MOST_NAMES:
        lines.append(f"and {len(span.tasks) - MOST_NAMES} more")
    return said(f"{literal(span.act.removeprefix('start '))}, micro-group {span.group}", lines)


def add_buffers(
    figure: go.Figure, moments: Sequence[Memory], lanes: dict[Lane, float], seconds: float, most: int
) -> None:
    """A bar from each moment to the next of the rank, as high as what it holds of the `most` that any holds."""
    ends = {moment.rank: seconds for moment in moments}
    bars = []
    for moment in reversed(moments):
        end, ends[moment.rank] = ends[moment.rank], moment.at
        if moment.bytes and end > moment.at:
            bars.append((moment, end, 0.8 * moment.bytes / most))
    figure.add_bar(
        name=BUFFERS,
        base=[round(moment.at, 12) for moment, _, _ in bars],
        x=[round(end - moment.at, 12) for moment, end, _ in bars],
        y=[lanes[moment.rank, BUFFERS, 0] + 0.4 - height / 2 for moment, _, height in bars],
        width=[round(height, 4) for _, _, height in bars],
        marker={"color": GREY, "line": {"width": 0}, "opacity": 0.6},
        hovertext=[
            said(f"buffers of rank {m.rank}", [f"{period(m.at)} to {period(end)}", f"holds {readable_bytes(m.bytes)}"])
            for m, end, _ in bars
        ],
        customdata=[-1] * len(bars),
    )


# -- ranks -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Metric:
    """A figure of every rank, made of parts.

    Attributes:
        name: short, for ids; `title` for people; `about` says what it counts.
        ranks: global ranks; all sequences have their length.
        parts: (legend, values, colour).
        unit: "FLOP", "s" or "B".
        more: lines beside the pointer, per rank.
    """

    name: str
    title: str
    about: str
    unit: str
    ranks: Sequence[int]
    parts: Sequence[tuple[str, Sequence[float], str]]
    more: Sequence[Sequence[str]] = ()

    @property
    def totals(self) -> list[float]:
        return [sum(values) for values in zip(*(values for _, values, _ in self.parts), strict=True)]

    def say(self, value: float) -> str:
        return {"FLOP": readable, "s": period, "B": readable_bytes}[self.unit](value)

    @property
    def summary(self) -> str:
        totals = self.totals
        most, mean = max(totals), sum(totals) / len(totals)
        spread = f", {most / mean:.2f} times the mean of {self.say(mean)} (dashed)" if mean else ""
        worst = f"The most is {self.say(most)} on rank {self.ranks[totals.index(most)]}{spread}."
        return f"{plural(len(totals), 'rank')}: {self.about}. {worst}"


def metrics(forecast: Forecast) -> Iterator[Metric]:
    """What the page says of every rank."""
    loads, ranks = forecast.loads, forecast.simulation.ranks
    if loads:
        own = [load.rank for load in loads]
        more = [
            [
                plural(load.tasks, "matrix", "matrices"),
                *(f"micro-group {g}: {readable(n)}" for g, n in list(load.by_group.items())[:MOST_GROUPS]),
            ]
            for load in loads
        ]
        groups = sorted({group for load in loads for group in load.by_group}) if len(loads) <= MOST_BARS else []
        parts = [("", [load.by_group.get(g, 0) for load in loads], (BLUE, PALE)[i % 2]) for i, g in enumerate(groups)]
        about = "FLOPs of the distributed matrices that a rank computes in a step"
        whole = [("", [load.flops for load in loads], BLUE)]
        yield Metric("work", "Work", about, "FLOP", own, parts or whole, more)
    if ranks:
        own = [rank.rank for rank in ranks]
        time = [
            ("computes", [rank.compute for rank in ranks], BLUE),
            ("waits for a transfer", [rank.exposed for rank in ranks], ORANGE),
            ("waits for other ranks", [rank.bubble for rank in ranks], GREY),
        ]
        yield Metric("time", "Time", "where the step goes on each rank", "s", own, time)
        peak, sent = [("", [rank.peak for rank in ranks], GREEN)], [("", [rank.sent for rank in ranks], ORANGE)]
        yield Metric("buffers", "Buffers", "most bytes of buffers at any time", "B", own, peak)
        yield Metric("sent", "Sent", "bytes sent to other ranks in a step", "B", own, sent)


def per_rank(metric: Metric) -> go.Figure:
    """A column per rank; beside many of them, how many ranks have how much."""
    totals, many = metric.totals, len(metric.ranks) > MOST_BARS
    figure = go.Figure()
    if many:
        figure = make_subplots(1, 2, shared_yaxes=True, column_widths=[0.82, 0.18], horizontal_spacing=0.02)
    for name, values, colour in metric.parts:
        look = {"name": name, "showlegend": bool(name), "hoverinfo": "skip", "x": metric.ranks, "y": values}
        if many:
            figure.add_scatter(**look, stackgroup="ranks", line={"width": 0, "shape": "hvh"}, fillcolor=colour)
        else:
            figure.add_bar(**look, marker_color=colour)
    mean = sum(totals) / len(totals)
    figure.add_scatter(  # nothing to see: it answers the pointer for all parts of a rank
        x=metric.ranks,
        y=totals,
        mode="markers",
        marker={"opacity": 0},
        showlegend=False,
        hovertext=[beside(metric, i, total, mean) for i, total in enumerate(totals)],
        hovertemplate="%{hovertext}<extra></extra>",
    )
    if many:
        add_classes(figure, metric, totals)
    figure.add_hline(y=mean, line={"dash": "dash", "width": 1.2})
    figure.update_yaxes(fixedrange=True, range=[0, 1.06 * max(totals) or 1], **axis_of(metric.unit, max(totals)))
    figure.update_layout(xaxis={"tickformat": "d", "range": [metric.ranks[0] - 0.5, metric.ranks[-1] + 0.5]})
    return finished(figure, height=190, barmode="stack", hovermode="x")


def beside(metric: Metric, i: int, total: float, mean: float) -> str:
    against = f" ({total / mean:.2f} × mean)" if mean else ""
    lines = [f"{metric.say(total)}{against}"]
    lines += [f"{name} {metric.say(values[i])}" for name, values, _ in metric.parts if name]
    return said(f"rank {metric.ranks[i]}", lines + list(metric.more[i] if metric.more else ()))


def add_classes(figure: go.Figure, metric: Metric, totals: Sequence[float]) -> None:
    """How many ranks have how much, turned so that it shares the axis."""
    low, high = min(totals), max(totals)
    counts = [0] * (32 if high > low else 1)
    width = (high - low) / len(counts) or high / 32 or 1.0
    for total in totals:
        counts[min(len(counts) - 1, int((total - low) / width))] += 1
    figure.add_bar(
        x=counts,
        y=[low + (i + 0.5) * width if high > low else low for i in range(len(counts))],
        width=width,
        orientation="h",
        marker_color=metric.parts[0][2],
        opacity=0.6,
        showlegend=False,
        hovertext=[
            said(plural(n, "rank"), [f"{metric.say(low + i * width)} to {metric.say(low + (i + 1) * width)}"])
            if high > low
            else said(plural(n, "rank"), [metric.say(low)])
            for i, n in enumerate(counts)
        ],
        hovertemplate="%{hovertext}<extra></extra>",
        row=1,
        col=2,
    )
    figure.update_xaxes(tickvals=[max(counts)], row=1, col=2)


def axis_of(unit: str, most: float) -> dict[str, object]:
    """How an axis up to `most` is marked: bytes by powers of two."""
    if unit != "B" or most <= 0:
        return {"tickformat": "~s", "ticksuffix": unit}
    step = 2.0 ** math.ceil(math.log2(most / 4))
    marks = [i * step for i in range(math.floor(most / step) + 1)]
    return {"tickvals": marks, "ticktext": [readable_bytes(mark) for mark in marks]}


# -- bars side by side -------------------------------------------------------------------------


def comparison(forecast: Forecast) -> go.Figure:
    """The step of each plan, and how much of it is exposed communication."""
    found = [own for own in forecast.alternatives if math.isfinite(own.seconds)]
    exposed = [min(own.exposed, own.seconds) for own in found]
    return side_by_side(
        [(literal(own.name, 24), period(own.seconds), own.chosen) for own in found],
        [
            ("computes, or waits for other ranks", [o.seconds - e for o, e in zip(found, exposed, strict=True)], BLUE),
            ("exposed communication, on the busiest rank", exposed, ORANGE),
        ],
    )


def strategies(template: TemplateForecast) -> go.Figure:
    """What each strategy that is possible takes."""
    found = [own for own in template.strategies if math.isfinite(own.seconds)]
    return side_by_side(
        [(literal(own.name), period(own.seconds), own.chosen) for own in found],
        [
            ("computes", [own.compute for own in found], BLUE),
            ("gathers", [own.gather for own in found], ORANGE),
            ("scatters", [own.scatter for own in found], GREEN),
        ],
    )


def pair(otherwise: str, planned: int, other: int) -> go.Figure:
    """Bytes as planned, and otherwise."""
    rows = [("as planned", readable_bytes(planned), True), (otherwise, readable_bytes(other), False)]
    return side_by_side(rows, [("", [planned, other], BLUE)], unit="B")


def side_by_side(
    rows: Sequence[tuple[str, str, bool]], parts: Sequence[tuple[str, Sequence[float], str]], unit: str = "s"
) -> go.Figure:
    """A bar per row, of parts (legend, values, colour); a row is (name, its sum in words, is it the chosen one?)."""
    sums = [sum(values) for values in zip(*(values for _, values, _ in parts), strict=True)]
    positive = [total for total in sums if total > 0]
    longest = min(max(sums, default=0), LONGEST * min(positive, default=0)) if unit == "s" else max(sums)
    figure = go.Figure()
    say = {"s": period, "B": readable_bytes}[unit]
    for name, values, colour in parts:
        figure.add_bar(
            name=name,
            showlegend=bool(name),
            x=values,
            y=list(range(len(rows))),
            orientation="h",
            width=0.62,
            marker_color=colour,
            hovertext=[said(row[0], [f"{name} {say(value)}"]) for row, value in zip(rows, values, strict=True)],
            hovertemplate="%{hovertext}<extra></extra>",
        )
    labels = [f"<b>{name}</b><br>{words}" if chosen else f"{name}<br>{words}" for name, words, chosen in rows]
    figure.update_yaxes(tickvals=list(range(len(rows))), ticktext=labels, showgrid=False, zeroline=False)
    figure.update_yaxes(range=[len(rows) - 0.5, -0.5], fixedrange=True)
    figure.update_xaxes(range=[0, 1.02 * longest or 1], minallowed=0, **axis_of(unit, longest))
    return finished(figure, height=40 * len(rows), barmode="stack")


def finished(figure: go.Figure, height: int, **layout: object) -> go.Figure:
    """What all figures have in common; `height` in pixels is that of the plot, to which margins and a legend add."""
    legend = any(trace.name and trace.showlegend is not False for trace in figure.data)
    top = 30 * legend + 24 * (figure.layout.xaxis.side == "top") + 8
    figure.update_yaxes(automargin=True)
    figure.update_layout(
        height=height + top + 28,
        margin={"l": 8, "r": 12, "t": top, "b": 28},
        legend={
            "orientation": "h",
            "traceorder": "normal",
            "x": 0,
            "xref": "container",
            "y": 1,
            "yref": "container",
            "yanchor": "top",
        },
        **layout,
    )
    return figure
