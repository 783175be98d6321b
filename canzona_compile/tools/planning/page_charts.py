"""The charts of a forecast's page, as plotly figures."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from canzona_compile.report.units import format_bytes, format_flops, plural
from canzona_compile.tools.planning.figures import Forecast, TemplateForecast
from canzona_compile.tools.planning.page_style import BLUE, GREEN, GREY, ORANGE, PALE, finished, literal, period, said
from canzona_compile.tools.planning.page_timeline import timelines

MOST_BARS = 64  # a chart draws a bar per rank, cut by micro-group, up to this many ranks; an area for more
MOST_GROUPS = 12  # micro-groups of a rank that the text at the pointer lists
LONGEST = 5  # times the shortest bar: longer bars leave the chart, so that the shortest stays visible


def charts(forecast: Forecast) -> dict[str, go.Figure]:
    """Make every figure, by the id of the element that shows it, and leave out empty ones."""
    found = {f"timeline-{i}": figure for i, figure in enumerate(timelines(forecast.simulation))}
    found |= {f"load-{metric.name}": per_rank(metric) for metric in metrics(forecast)}
    if forecast.alternatives:
        found["comparison-chart"] = comparison(forecast)
    memory = forecast.memory
    found["memory-buffers"] = pair("one micro-group", memory.buffers, memory.one_group)
    found["memory-state"] = pair("whole on all ranks", memory.state, memory.state_replicated)
    found |= {f"template-{i}": strategies(template) for i, template in enumerate(forecast.templates)}
    return found


# -- ranks -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Metric:
    """A quantity that every rank has, made of parts.

    Attributes:
        name: short, for ids; `title` for people; `about` says what it counts.
        ranks: global ranks; every other sequence has the same length.
        parts: (legend, values, colour).
        unit: "FLOP", "s" or "B".
        more: further lines of the text at the pointer, per rank.
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
        return {"FLOP": format_flops, "s": period, "B": format_bytes}[self.unit](value)

    @property
    def summary(self) -> str:
        totals = self.totals
        most, mean = max(totals), sum(totals) / len(totals)
        spread = f", {most / mean:.2f} times the mean of {self.say(mean)} (dashed)" if mean else ""
        worst = f"The most is {self.say(most)} on rank {self.ranks[totals.index(most)]}{spread}."
        return f"{plural(len(totals), 'rank')}: {self.about}. {worst}"


def metrics(forecast: Forecast) -> Iterator[Metric]:
    """Yield the quantities that the page shows for every rank."""
    loads, ranks = forecast.loads, forecast.simulation.ranks
    if loads:
        own = [load.rank for load in loads]
        more = [
            [
                plural(load.tasks, "matrix", "matrices"),
                *(f"micro-group {g}: {format_flops(n)}" for g, n in list(load.by_group.items())[:MOST_GROUPS]),
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
    """Draw a column per rank; beside many columns, draw how many ranks have how much."""
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
    figure.add_scatter(  # invisible: it shows the text at the pointer for all parts of a rank
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
    against = f" ({total / mean:.2f} \u00d7 mean)" if mean else ""
    lines = [f"{metric.say(total)}{against}"]
    lines += [f"{name} {metric.say(values[i])}" for name, values, _ in metric.parts if name]
    return said(f"rank {metric.ranks[i]}", lines + list(metric.more[i] if metric.more else ()))


def add_classes(figure: go.Figure, metric: Metric, totals: Sequence[float]) -> None:
    """Draw how many ranks have how much, as horizontal bars that share the axis."""
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
    """Mark an axis up to `most`; marks of bytes are multiples of a power of two."""
    if unit != "B" or most <= 0:
        return {"tickformat": "~s", "ticksuffix": unit}
    step = 2.0 ** math.ceil(math.log2(most / 4))
    marks = [i * step for i in range(math.floor(most / step) + 1)]
    return {"tickvals": marks, "ticktext": [format_bytes(mark) for mark in marks]}


# -- bars side by side -------------------------------------------------------------------------


def comparison(forecast: Forecast) -> go.Figure:
    """Draw the step of each plan, and how much of it is exposed communication."""
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
    """Draw the seconds that each possible strategy takes."""
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
    """Draw the bytes of the plan, and those of another choice."""
    rows = [("as planned", format_bytes(planned), True), (otherwise, format_bytes(other), False)]
    return side_by_side(rows, [("", [planned, other], BLUE)], unit="B")


def side_by_side(
    rows: Sequence[tuple[str, str, bool]], parts: Sequence[tuple[str, Sequence[float], str]], unit: str = "s"
) -> go.Figure:
    """Draw a bar per row, of parts (legend, values, colour); a row is (name, sum in words, whether it is chosen)."""
    sums = [sum(values) for values in zip(*(values for _, values, _ in parts), strict=True)]
    positive = [total for total in sums if total > 0]
    longest = min(max(sums, default=0), LONGEST * min(positive, default=0)) if unit == "s" else max(sums)
    figure = go.Figure()
    say = {"s": period, "B": format_bytes}[unit]
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
