"""Draws charts for a terminal: bars and timelines.

A chart is a table that has one flexible column for drawings, so that rich decides how wide they are. Every chart can be
read without colours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise

from rich.bar import Bar
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from canzona_compile.report.page import Bars, Timeline, TimelineEvent
from canzona_compile.report.sections import classes_of
from canzona_compile.report.units import format_quantity, format_seconds, plural

MOST_BARS = 32  # a series is drawn as one bar each up to this many, and as a histogram of more
MOST_CLASSES = 8  # of a histogram
AXIS_PARTS = 4
FILLS = "█▓▒"  # of numbered things, which use them in turn
COLOURS = ("cyan", "magenta", "yellow", "green", "blue")
ELEMENTWISE = "░"
IDLE = "·"
TRANSFERS = {"gather": "g", "scatter": "s", "exchange": "x"}  # their letters in labels


def fill(number: int) -> tuple[str, str]:
    """Return the letter and the colour that stand for a numbered thing."""
    return FILLS[number % len(FILLS)], COLOURS[number % len(COLOURS)]


@dataclass(frozen=True, slots=True)
class Stretch:
    """A part of a strip: from where to where, the letter and colour that fill it, and a label if there is room."""

    begin: float
    end: float
    letter: str
    style: str
    label: str = ""


@dataclass(frozen=True, slots=True)
class Strip:
    """One line of stretches, as wide as its column; a stretch of any length gets at least one cell.

    Attributes:
        stretches: in order; the later one wins a cell that two of them need.
    """

    total: float
    stretches: Sequence[Stretch]
    idle: str = " "

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        cells = [(self.idle, "dim")] * width
        for part in self.stretches:
            if not part.begin < part.end or not width:
                continue
            begin = min(width - 1, round(part.begin / self.total * width))
            end = min(width, max(begin + 1, round(part.end / self.total * width)))
            cells[begin:end] = [(part.letter, part.style)] * (end - begin)
            room = end - begin
            label = f" {part.label} " if part.label and room >= len(part.label) + 4 else part.label
            if room >= max(2, len(label)):
                at = begin + (room - len(label)) // 2
                cells[at : at + len(label)] = [(letter, f"bold {part.style}") for letter in label]
        found = Text(no_wrap=True, overflow="crop")
        for style, run in groupby(cells, key=lambda cell: cell[1]):
            found.append("".join(letter for letter, _ in run), style)
        yield found

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(1, options.max_width)


def chart(notes: int) -> Table:
    """Begin a chart: a column of labels, one of drawings, and `notes` columns of right-aligned remarks."""
    made = Table.grid(padding=(0, 1, 0, 0), expand=True)
    made.add_column(no_wrap=True)
    made.add_column(ratio=1)
    for _ in range(notes):
        made.add_column(justify="right", no_wrap=True)
    return made


def bars(content: Bars) -> Table:
    """Draw a bar each; of a long series, draw how many bars have which total."""
    if content.of and len(content.bars) > MOST_BARS:
        return histogram(content)
    made = chart(3)
    fills = [fill(kind if isinstance(kind, int) else i) for i, (_, kind) in enumerate(content.parts)]
    for bar in content.bars:
        ends = pairwise(accumulate(bar.values, initial=0.0))
        strip = Strip(content.most, [Stretch(*part, *look) for part, look in zip(ends, fills, strict=True)])
        away = deviation(bar.total, content.mean) if content.of else ""
        label = Text(f"{content.of} {bar.name}".strip())
        made.add_row(label, strip, format_quantity(bar.total, content.unit), away, *bar.remarks)
    return made


def deviation(value: float, mean: float) -> str:
    """Say how far a value is from the mean, "+4%"; nothing within half a percent."""
    percent = round(100 * (value / mean - 1)) if mean else 0
    return f"{percent:+d}%" if percent else ""


def histogram(content: Bars) -> Table:
    """Count the bars of a series by their totals, in equal classes."""
    counts, ends = classes_of([bar.total for bar in content.bars], MOST_CLASSES)
    made = chart(1)
    for count, own in zip(counts, ends, strict=True):
        label = " to ".join(dict.fromkeys(format_quantity(end, content.unit) for end in own))
        drawn = Bar(max(counts), 0, count, color=COLOURS[0])
        made.add_row(label, drawn, plural(count, content.of) if count else "-")
    return made


def timeline(content: Timeline) -> Table:
    """Draw a time axis, a line per lane with the share of the time that it is busy, and the meaning of the letters."""
    made, total, seen = chart(1), content.seconds, set[str]()
    made.add_row("", axis(total), Text(format_seconds(total), "dim"))
    for lane in content.lanes:
        if lane.detail:
            continue
        busy = sum(event.end - event.begin for event in lane.events) / total
        strip = Strip(total, [stretch(event) for event in lane.events], IDLE)
        made.add_row(Text(f"{lane.of} {lane.name}".strip()), strip, Text(f"busy {busy:.0%}", "dim"))
        seen |= {event.kind for event in lane.events if event.begin < event.end}
    words = [f"{letter} {kind}" for kind, letter in [*TRANSFERS.items(), ("elementwise", ELEMENTWISE)] if kind in seen]
    made.add_row("", Text("  ".join([f"number: {content.numbers}", *words, f"{IDLE} idle"]), "dim"))
    return made


def stretch(event: TimelineEvent) -> Stretch:
    """Draw an event with the fill of its number, which is its label, after a letter if it is a transfer."""
    if event.kind == "elementwise":
        return Stretch(event.begin, event.end, ELEMENTWISE, "dim")
    letter = "" if event.kind == "compute" else TRANSFERS.get(event.kind, event.kind[0])
    return Stretch(event.begin, event.end, *fill(event.number), f"{letter}{event.number}")


def axis(total: float) -> Table:
    """Draw a time axis from 0 to `total` seconds, with a label at the begin of each of its equal parts."""
    made = Table.grid(expand=True)
    for _ in range(AXIS_PARTS):
        made.add_column(ratio=1)
    labels = ["0", *(format_seconds(total * i / AXIS_PARTS) for i in range(1, AXIS_PARTS))]
    made.add_row(*(Rule(Text(f"├ {label}", "dim"), align="left", style="dim") for label in labels))
    return made
