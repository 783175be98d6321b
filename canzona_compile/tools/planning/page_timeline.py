"""The timeline of a forecast's page: when each rank computes and sends what."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

import plotly.graph_objects as go

from canzona_compile.report.units import format_bytes, plural
from canzona_compile.simulation.figures import COMPUTE, NETWORK, NODE, STREAMS, Memory, Simulation, Span
from canzona_compile.tools.planning.page_style import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PALE,
    PINK,
    finished,
    literal,
    period,
    said,
    share,
)
from canzona_compile.tools.planning.trace import tracks

MOST_DRAWN = 2500  # bars in one chart
MOST_NAMES = 8  # of matrices in the text at the pointer; a click lists all
LANE = 15  # pixels
BUFFERS = "buffers"
KINDS = {
    "compute": ("computes matrices", BLUE),
    "elementwise": ("prepares, applies", PALE),
    "gather": ("gathers", ORANGE),
    "scatter": ("scatters", GREEN),
    "exchange": ("exchanges", PINK),
    "other": ("other", GREY),
}
STREAM_WORDS = {COMPUTE: "processor", NODE: "links within the node", NETWORK: "links to other nodes"}

Lane = tuple[int, str, int]  # rank, one of STREAMS or BUFFERS, row; overlapping spans need several rows


def timelines(simulation: Simulation) -> Iterator[go.Figure]:
    """Draw the shown ranks, in charts of as many ranks as a browser draws without delay."""
    if not simulation.spans or simulation.seconds <= 0:
        return
    size = Counter(span.rank for span in simulation.spans) + Counter(moment.rank for moment in simulation.memory)
    parts: list[list[int]] = [[]]
    for rank in simulation.shown:
        if parts[-1] and sum(size[r] for r in (*parts[-1], rank)) > MOST_DRAWN:
            parts.append([])
        parts[-1].append(rank)
    members: dict[int, set[int]] = defaultdict(set)
    for span in simulation.spans:
        members[span.flow].add(span.rank)
    places = {tasks: i for i, tasks in enumerate(task_lists(simulation))}
    for ranks in parts:
        yield timeline(simulation, ranks, members, places)


def timeline(
    simulation: Simulation,
    ranks: Sequence[int],
    members: Mapping[int, set[int]],
    places: Mapping[tuple[str, ...], int],
) -> go.Figure:
    """Draw a lane per stream of each given rank, and a lane of its buffers.

    Args:
        members: the ranks of each collective, by its number.
        places: the place of each list of matrices in `task_lists`. A bar's `customdata` is its list's place, or -1.
    """
    spans = [span for span in simulation.spans if span.rank in ranks]
    moments = [moment for moment in simulation.memory if moment.rank in ranks]
    rows = tracks(spans)
    lanes = lanes_of(ranks, spans, rows, moments)
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
            customdata=[places.get(span.tasks, -1) for span, _ in kinds[kind]],
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
    """Return the position of each lane from the top, with a gap between ranks."""
    used = {(span.rank, span.stream, row) for span, row in zip(spans, rows, strict=True)}
    used |= {(rank, COMPUTE, 0) for rank in ranks}
    used |= {(moment.rank, BUFFERS, 0) for moment in moments}
    order = (*STREAMS, BUFFERS)
    ordered = sorted(used, key=lambda lane: (ranks.index(lane[0]), order.index(lane[1]), lane[2]))
    return {lane: i + 0.6 * ranks.index(lane[0]) for i, lane in enumerate(ordered)}


def kind_of(act: str) -> str:
    """Return the one of KINDS that an act of the schedule is."""
    if act in ("prepare", "apply"):
        return "elementwise"
    return next((kind for kind in KINDS if act.endswith(kind)), "other")


def task_lists(simulation: Simulation) -> list[tuple[str, ...]]:
    """Return the different lists of matrices that spans compute."""
    return list(dict.fromkeys(span.tasks for span in simulation.spans if span.tasks))


def describe(span: Span, total: float, members: int) -> str:
    length = span.end - span.start
    lines = [
        f"rank {span.rank}, {STREAM_WORDS[span.stream]}",
        f"{period(span.start)} to {period(span.end)}",
        f"lasts {period(length)}, {share(length, total)} of the step",
    ]
    if span.flow >= 0:
        lines.append(f"sends {format_bytes(span.bytes)}")
        lines.append(f"collective {span.flow}, {plural(members, 'rank')} of those shown")
    lines += [literal(name, 44) for name in span.tasks[:MOST_NAMES]]
    if len(span.tasks) > MOST_NAMES:
        lines.append(f"and {len(span.tasks) - MOST_NAMES} more")
    return said(f"{literal(span.act.removeprefix('start '))}, micro-group {span.group}", lines)


def add_buffers(
    figure: go.Figure, moments: Sequence[Memory], lanes: dict[Lane, float], seconds: float, most: int
) -> None:
    """Draw a bar from each moment of a rank to its next; its height is the share of `most` that the rank holds."""
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
            said(f"buffers of rank {m.rank}", [f"{period(m.at)} to {period(end)}", f"holds {format_bytes(m.bytes)}"])
            for m, end, _ in bars
        ],
        customdata=[-1] * len(bars),
    )
