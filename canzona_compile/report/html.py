"""Renders a page as one HTML file, which opens from disk and loads nothing: the template `page.html` filled in.

The file holds texts only escaped or as JSON. A policy in it allows the scripts that it contains, by their hashes, and
forbids to load anything. Users choose names, and plotly reads a little markup in texts, so `literal` escapes every text
from outside. This needs the extra "page", so it is imported only when a user asks for a file.
"""

from __future__ import annotations

import base64
import hashlib
import html as entities
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

import jinja2
import plotly.graph_objects as go
from markupsafe import Markup, escape
from plotly.offline import get_plotlyjs
from plotly.subplots import make_subplots

from canzona_compile.report.page import (
    Bar,
    Bars,
    Block,
    Detail,
    Fill,
    Lane,
    PageModel,
    PageTable,
    Section,
    Timeline,
    TimelineEvent,
    text_of,
)
from canzona_compile.report.sections import classes_of, rows_without_overlap
from canzona_compile.report.units import format_bytes, format_quantity, format_seconds, plural


def html(page: PageModel) -> str:
    """Write the whole file; store it in UTF-8."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.lstrip_blocks = True
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    environment.filters |= {"opened": opened, "formula": formula, "kind": lambda block: type(block).__name__}
    environment.tests["section"] = lambda block: isinstance(block, Section)
    environment.globals |= {"digest": digest, "plotly": get_plotlyjs()}
    template = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    text = environment.from_string(template).render(page=page, scripted=Scripted())
    return text.encode("utf-8", "xmlcharrefreplace").decode()  # half of a surrogate pair is not a character


@dataclass(slots=True)
class Scripted:
    """What the script of a page shows. The template adds to it while it is filled in.

    Attributes:
        figures: by the id of the element that shows it.
    """

    figures: dict[str, Any] = field(default_factory=dict)
    tables: list[Any] = field(default_factory=list)
    lists: Lists = field(default_factory=dict)

    def draw(self, chart: Bars | Timeline) -> list[str]:
        """Draw a chart, and return the ids of its figures."""
        kind = type(chart).__name__.lower()
        begin = sum(name.startswith(kind) for name in self.figures)
        found = {f"{kind}-{i}": own.to_plotly_json() for i, own in enumerate(figures_of(chart, self.lists), begin)}
        self.figures |= found
        return list(found)

    def enter(self, table: PageTable) -> int:
        """Enter a table, and return its place."""
        self.tables.append(coded(table))
        return len(self.tables) - 1

    @property
    def data(self) -> dict[str, Any]:
        return {"figures": self.figures, "lists": list(self.lists), "tables": self.tables}


def coded(table: PageTable) -> dict[str, Any]:
    """Write a table as the different texts of each column, and rows of their places."""
    columns: list[dict[str, int]] = [{} for _ in table.headers]
    rows = []
    for row in table.cells:
        texts = ["" if isinstance(cell, Fill) else text_of(cell) for cell in row]
        rows.append([found.setdefault(text, len(found)) for text, found in zip(texts, columns, strict=True)])
    return {"texts": [list(found) for found in columns], "rows": rows}


def opened(body: Iterable[Block]) -> list[Block]:
    """The blocks of a body, those of its details among them, without empty sections."""
    found: list[Block] = []
    for block in body:
        if isinstance(block, Detail):
            found += opened(block.body)
        elif not isinstance(block, Section) or opened(block.body):
            found.append(block)
    return found


def formula(text: str) -> Markup:
    """Typeset "10 m^3 + 2 m n"."""
    return Markup(re.sub(r"\^(\w+|\([^()]*\))", r"<sup>\1</sup>", str(escape(text))))


def digest(script: str) -> str:
    """Return the name by which a content security policy allows this script."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


MOST_BARS = 64  # a series has a bar each, cut into parts, up to this many; it is an area if it is longer
MOST_PARTS = 12  # of a bar that the text at the pointer lists
LONGEST = 5  # times the shortest bar: longer bars leave the chart, so that the shortest stays visible
MOST_DRAWN = 2500  # events in one chart, which a browser draws without delay
MOST_NAMES = 8  # of an event in the text at the pointer; a click lists all
MOST_CLASSES = 32  # of a long series by its totals
LANE = 15  # pixels
# Okabe and Ito's hues, which colour-blind people tell apart, in shades that read on light and dark.
BLUE, PALE, ORANGE, GREEN, PINK, GREY = "#2a86c0", "#86bfe2", "#e39a1f", "#1fa37b", "#c76dab", "#969ca6"
COLOURS = {
    **{"compute": BLUE, "elementwise": PALE, "gather": ORANGE, "scatter": GREEN, "exchange": PINK},
    **{"wait": GREY, "buffers": GREY},
}

Lists = dict[tuple[str, ...], int]  # the different lists of names, each with its place


def figures_of(chart: Bars | Timeline, lists: Lists) -> Iterator[go.Figure]:
    """Draw a chart, a timeline of many events in several figures. Lists of names that a click shows go to `lists`."""
    if isinstance(chart, Timeline):
        yield from timelines(chart, lists)
    else:
        yield series(chart) if chart.of else side_by_side(chart)


def colour_of(kind: str | int) -> str:
    """Return the colour of a kind; numbered things have two in turn."""
    return (BLUE, PALE)[kind % 2] if isinstance(kind, int) else COLOURS.get(kind, GREY)


def literal(text: str, most: int = 10**6) -> str:
    """Escape a text so that plotly shows it unchanged, without its middle if it has more than `most` characters."""
    half = most // 2
    return entities.escape(text if len(text) <= most else f"{text[:half]}…{text[-half:]}", quote=False)


def said(title: str, lines: Sequence[str]) -> str:
    """Write the text at the pointer."""
    return "<br>".join([f"<b>{literal(title)}</b>", *map(literal, lines)])


def finished(figure: go.Figure, height: int, **layout: object) -> go.Figure:
    """Give a figure the common frame. `height` in pixels is that of the plot, without margins and legend."""
    legend = any(trace.name and trace.showlegend is not False for trace in figure.data)
    top = 30 * legend + 24 * (figure.layout.xaxis.side == "top") + 8
    place = {"x": 0, "xref": "container", "y": 1, "yref": "container", "yanchor": "top"}
    figure.update_yaxes(automargin=True, fixedrange=True)
    figure.update_traces(hovertemplate="%{hovertext}<extra></extra>", selector={"hoverinfo": None})
    figure.update_layout(
        height=height + top + 28,
        margin={"l": 8, "r": 12, "t": top, "b": 28},
        legend={"orientation": "h", "traceorder": "normal", **place},
        **layout,
    )
    return figure


def axis_of(unit: str, most: float) -> dict[str, object]:
    """Mark an axis up to `most`; marks of bytes are multiples of a power of two."""
    if unit != "B" or most <= 0:
        return {"tickformat": "~s", "ticksuffix": unit}
    step = 2.0 ** math.ceil(math.log2(most / 4))
    marks = [i * step for i in range(math.floor(most / step) + 1)]
    return {"tickvals": marks, "ticktext": [format_bytes(mark) for mark in marks]}


# -- bars --------------------------------------------------------------------------------------


def series(chart: Bars) -> go.Figure:
    """Draw a column per bar; beside many columns, draw how many bars have how much."""
    totals, mean, many = [bar.total for bar in chart.bars], chart.mean, len(chart.bars) > MOST_BARS
    figure = go.Figure()
    if many:
        figure = make_subplots(1, 2, shared_yaxes=True, column_widths=[0.82, 0.18], horizontal_spacing=0.02)
    numbers = [bar.name for bar in chart.bars]
    for name, kind, values in parts_of(chart, whole=many):
        shared = {"name": name, "showlegend": bool(name), "hoverinfo": "skip", "x": numbers, "y": values}
        if many:
            figure.add_scatter(**shared, stackgroup="all", line={"width": 0, "shape": "hvh"}, fillcolor=colour_of(kind))
        else:
            figure.add_bar(**shared, marker_color=colour_of(kind))
    figure.add_scatter(  # invisible: it shows the text at the pointer for all parts of a bar
        x=numbers,
        y=totals,
        mode="markers",
        marker={"opacity": 0},
        showlegend=False,
        hovertext=[described(chart, bar, mean) for bar in chart.bars],
    )
    if many:
        add_classes(figure, chart, totals)
    figure.add_hline(y=mean, line={"dash": "dash", "width": 1.2})
    figure.update_yaxes(range=[0, 1.06 * chart.most or 1], **axis_of(chart.unit, chart.most))
    ends = [chart.bars[0].name, chart.bars[-1].name]
    figure.update_layout(xaxis={"tickformat": "d", "range": [int(ends[0]) - 0.5, int(ends[1]) + 0.5]})
    return finished(figure, height=190, barmode="stack", hovermode="x")


def parts_of(chart: Bars, whole: bool) -> Iterator[tuple[str, str | int, list[float]]]:
    """Yield name, kind and values of each part. Numbered parts have no names, and are one if they shall be whole."""
    numbered = any(isinstance(kind, int) for _, kind in chart.parts)
    if numbered and whole:
        yield "", 0, [bar.total for bar in chart.bars]
        return
    for i, (name, kind) in enumerate(chart.parts):
        yield "" if numbered else name, i if numbered else kind, [bar.values[i] for bar in chart.bars]


def described(chart: Bars, bar: Bar, mean: float) -> str:
    """Say what a bar of a series amounts to, and its largest parts."""
    against = f" ({bar.total / mean:.2f} \u00d7 mean)" if mean else ""
    parts = [(name, value) for (name, _), value in zip(chart.parts, bar.values, strict=True) if name and value]
    lines = [f"{name} {format_quantity(value, chart.unit)}" for name, value in parts[:MOST_PARTS]]
    total = f"{format_quantity(bar.total, chart.unit)}{against}"
    return said(f"{chart.of} {bar.name}", [total, *bar.remarks, *lines])


def add_classes(figure: go.Figure, chart: Bars, totals: Sequence[float]) -> None:
    """Draw how many bars have how much, as horizontal bars that share the axis."""
    counts, ends = classes_of(totals, MOST_CLASSES)
    low, high = ends[0]
    figure.add_bar(
        x=counts,
        y=[sum(own) / 2 for own in ends],
        width=high - low or high / MOST_CLASSES or 1.0,
        orientation="h",
        marker_color=colour_of(chart.parts[0][1]),
        opacity=0.6,
        showlegend=False,
        hovertext=[
            said(plural(n, chart.of), [" to ".join(dict.fromkeys(format_quantity(end, chart.unit) for end in own))])
            for n, own in zip(counts, ends, strict=True)
        ],
        row=1,
        col=2,
    )
    figure.update_xaxes(tickvals=[max(counts)], row=1, col=2)


def side_by_side(chart: Bars) -> go.Figure:
    """Draw a row per bar, with its total in words."""
    totals, places = [bar.total for bar in chart.bars], list(range(len(chart.bars)))
    longest = max(totals)
    if chart.unit == "s":
        longest = min(longest, LONGEST * min((total for total in totals if total > 0), default=0))
    figure = go.Figure()
    for i, (name, kind) in enumerate(chart.parts):
        texts = [f"{name} {format_quantity(bar.values[i], chart.unit)}".strip() for bar in chart.bars]
        figure.add_bar(
            name=name,
            showlegend=bool(name),
            x=[bar.values[i] for bar in chart.bars],
            y=places,
            orientation="h",
            width=0.62,
            marker_color=colour_of(kind),
            hovertext=[said(str(bar.name), [text]) for bar, text in zip(chart.bars, texts, strict=True)],
        )
    labels = []
    for bar in chart.bars:
        name = literal(str(bar.name), 24)
        words = format_quantity(bar.total, chart.unit)
        labels.append(f"<b>{name}</b><br>{words}" if bar.chosen else f"{name}<br>{words}")
    figure.update_yaxes(tickvals=places, ticktext=labels, showgrid=False, zeroline=False)
    figure.update_yaxes(range=[len(places) - 0.5, -0.5])
    figure.update_xaxes(range=[0, 1.02 * longest or 1], minallowed=0, **axis_of(chart.unit, longest))
    return finished(figure, height=40 * len(places), barmode="stack")


# -- timelines ---------------------------------------------------------------------------------


def timelines(chart: Timeline, lists: Lists) -> Iterator[go.Figure]:
    """Draw a timeline, in figures of as many events as a browser draws without delay."""
    together: dict[str, list[Lane]] = defaultdict(list)
    for lane in chart.lanes:
        together[lane.of].append(lane)
    parts: list[list[Lane]] = [[]]
    for lanes in together.values():
        if parts[-1] and sum(len(lane.events) for lane in (*parts[-1], *lanes)) > MOST_DRAWN:
            parts.append([])
        parts[-1] += lanes
    for lanes in parts:
        yield timeline(chart.seconds, lanes, lists)


def timeline(seconds: float, lanes: Sequence[Lane], lists: Lists) -> go.Figure:
    """Draw lanes. A bar's `customdata` is the place of its event's names in `lists`, or -1."""
    kinds: dict[str, list[tuple[TimelineEvent, float]]] = defaultdict(list)
    labels: dict[float, str] = {}
    place, of = -1.0, ""
    for i, lane in enumerate(lanes):
        first = not i or lane.of != of
        place, of = place + 0.6 * (i > 0 and first), lane.of
        rows = rows_without_overlap([(event.begin, event.end) for event in lane.events])
        for event, row in sorted(
            zip(lane.events, rows, strict=True), key=lambda pair: (pair[1], pair[0].begin, pair[0].end)
        ):
            kinds[event.kind].append((event, place + 1 + row))
        labels[place + 1] = f"<b>{literal(lane.of)}</b> {lane.name}" if first else lane.name
        labels |= {place + 1 + row: "" for row in range(1, max(rows, default=0) + 1)}
        place += 1 + max(rows, default=0)
    figure = go.Figure()
    for kind in sorted(kinds, key=[*COLOURS, *kinds].index):
        found = kinds[kind]
        buffers, look = kind == "buffers", colour_of(kind)
        figure.add_bar(
            name=kind,
            base=[round(event.begin, 12) for event, _ in found],  # to a picosecond, to save space
            x=[round(event.end - event.begin, 12) for event, _ in found],
            y=[place + 0.4 * (1 - event.height) for event, place in found],
            width=[round(0.8 * event.height, 4) for event, _ in found],
            # A line, so that short events are seen.
            marker={"color": look, "line": {"color": look, "width": 0 if buffers else 0.5}},
            opacity=0.6 if buffers else 1.0,
            orientation="h",
            textposition="none",
            hovertext=[hover_text(event, seconds) for event, _ in found],
            customdata=[lists.setdefault(e.names, len(lists)) if e.names else -1 for e, _ in found],
        )
    height = LANE * place + 80
    slider = {"rangeslider": {"thickness": 36 / height}, "minallowed": 0, "maxallowed": seconds}
    figure.update_xaxes(tickformat="~s", ticksuffix="s", side="top", range=[0, seconds], **slider)
    figure.update_yaxes(tickvals=list(labels), ticktext=list(labels.values()), range=[place + 0.7, -0.7])
    figure.update_yaxes(showgrid=False, zeroline=False, tickfont_size=10)
    return finished(figure, round(height), barmode="overlay")


def hover_text(event: TimelineEvent, total: float) -> str:
    """Say what an event is."""
    begin = format_seconds(event.begin) if event.begin else "0"
    length = event.end - event.begin
    lines = [*event.remarks[:1], f"{begin} to {format_seconds(event.end)}"]
    lines += [f"lasts {format_seconds(length)}, {100 * length / total:.3g}% of all", *event.remarks[1:]]
    names = [literal(name, 44) for name in event.names[:MOST_NAMES]]
    if len(event.names) > MOST_NAMES:
        names.append(f"and {len(event.names) - MOST_NAMES} more")
    return "<br>".join([said(event.title or event.kind, lines), *names])
