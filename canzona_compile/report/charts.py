"""Charts for a terminal: loads as bars, a step as a timeline, a period as a row of columns.

A chart is a `rich` table that has one flexible column for drawings, so that rich decides how wide they are. A fill and
a colour stand for a micro-group, the same in all charts; the table of micro-groups is their legend. Every chart can be
read without colours.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise

from rich.bar import Bar
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from canzona_compile.report.schema import LoadReport, ProfileReport
from canzona_compile.report.units import format_flops, format_seconds, plural

MOST_BARS = 32  # a chart draws one bar per rank up to this many ranks, and a histogram of more
MOST_CLASSES = 8  # of a histogram, at most
PARTS = 4  # of a time axis
FILLS = "█▓▒"  # of micro-groups, which use them in turn
COLOURS = ("cyan", "magenta", "yellow", "green", "blue")
ELEMENTWISE = "░"
IDLE = "·"
LEVELS = "▁▂▃▄▅▆▇█"  # from little to all
TRANSFERS = {"gather": "g", "scatter": "s", "exchange": "x"}  # their letters in labels


def fill(micro_group: int) -> tuple[str, str]:
    """Return the letter and the colour that stand for a micro-group."""
    return FILLS[micro_group % len(FILLS)], COLOURS[micro_group % len(COLOURS)]


@dataclass(frozen=True, slots=True)
class Stretch:
    """A part of a strip.

    Attributes:
        begin, end: its position, in the unit of the strip's total.
        letter: the letter that fills it.
        style: its colour.
        label: a text to write into it where there is room.
    """

    begin: float
    end: float
    letter: str
    style: str
    label: str = ""


@dataclass(frozen=True, slots=True)
class Strip:
    """One line of stretches, as wide as its column; a stretch of any length gets at least one cell.

    Attributes:
        total: the value that the whole width stands for.
        stretches: in order; the later one wins a cell that two of them need.
        idle: the letter between stretches.
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
        text = Text(no_wrap=True, overflow="crop")
        for style, run in groupby(cells, key=lambda cell: cell[1]):
            text.append("".join(letter for letter, _ in run), style)
        yield text

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(1, options.max_width)


@dataclass(frozen=True, slots=True)
class Columns:
    """Values as a row of columns, one letter each. Without room for all, a column shows the largest of neighbours.

    Attributes:
        values: from 0 to `most`.
        most: the value that the highest column stands for.
    """

    values: Sequence[float]
    most: float

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        each = math.ceil(len(self.values) / max(1, options.max_width))
        tops = [max(self.values[i : i + each]) for i in range(0, len(self.values), each)]
        heights = [round((len(LEVELS) - 1) * top / self.most) if self.most else 0 for top in tops]
        yield Text("".join(LEVELS[height] for height in heights), COLOURS[0], no_wrap=True, overflow="crop")

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(1, min(len(self.values), options.max_width))


def chart(*, notes: int, expand: bool = True) -> Table:
    """Begin a chart: a column of labels, one of drawings, and `notes` columns of right-aligned remarks."""
    table = Table.grid(padding=(0, 1, 0, 0), expand=expand)
    table.add_column(no_wrap=True)
    table.add_column(ratio=1 if expand else None)
    for _ in range(notes):
        table.add_column(justify="right", no_wrap=True)
    return table


def load_chart(loads: Sequence[LoadReport], imbalance: float) -> Iterator[RenderableType]:
    """Draw the FLOPs of every rank by micro-group; for many ranks, draw how many ranks have which load.

    Args:
        loads: FLOPs per step, by rank; there may be none.
        imbalance: FLOPs of the busiest rank over those of the mean rank.

    Yields:
        The chart, and its mean and maximum in words.
    """
    if not loads:
        return
    most, mean = max(one.flops for one in loads), sum(one.flops for one in loads) / len(loads)
    if len(loads) > MOST_BARS:
        yield histogram([one.flops for one in loads])
    else:
        bars = chart(notes=3)
        for one in loads:
            count = plural(one.tasks, "matrix", "matrices")
            bars.add_row(
                f"rank {one.rank}", load_bar(one, most), format_flops(one.flops), deviation(one.flops, mean), count
            )
        yield bars
    words = f"mean {format_flops(mean)}, max {format_flops(most)}, "
    yield Text.assemble(words, (f"max/mean {imbalance:.2f}", "bold"))


def load_bar(load: LoadReport, most: float) -> Strip:
    """Draw one rank's FLOPs, a stretch per micro-group."""
    ends = accumulate(load.by_group.values(), initial=0)
    parts = zip(load.by_group, pairwise(ends), strict=True)
    return Strip(most, [Stretch(begin, end, *fill(micro_group)) for micro_group, (begin, end) in parts])


def deviation(value: float, mean: float) -> str:
    """Say how far a value is from the mean, "+4%"; nothing within half a percent."""
    percent = round(100 * (value / mean - 1)) if mean else 0
    return f"{percent:+d}%" if percent else ""


def histogram(flops: Sequence[int]) -> Table:
    """Count ranks by their FLOPs, in equal classes."""
    low, high = min(flops), max(flops)
    classes = MOST_CLASSES if high > low else 1
    step = (high - low) / classes
    counts = [0] * classes
    for one in flops:
        counts[min(classes - 1, int((one - low) / step)) if step else 0] += 1
    table = chart(notes=1)
    for i, count in enumerate(counts):
        begin, end = (format_flops(low + j * step) for j in (i, i + 1))
        label = begin if classes == 1 else f"{begin} to {end}"
        table.add_row(label, Bar(max(counts), 0, count, color=COLOURS[0]), plural(count, "rank") if count else "-")
    return table


def event(act: str, stream: str, micro_group: int, begin: float, end: float) -> Stretch:
    """Draw an act of a rank or a link as a stretch of a timeline.

    Args:
        act: an act of the schedule: "compute", "start gather", "prepare", ...
        stream: "compute" for the work of a processor, else the name of a link.
        micro_group: its index.
        begin, end: seconds from the begin of the step.

    Returns:
        A stretch with the micro-group's fill. Its label is the index, after a letter if the act is a transfer.
    """
    word = act.split()[-1]
    if stream == "compute" and word != "compute":
        return Stretch(begin, end, ELEMENTWISE, "dim")
    kind = "" if stream == "compute" else TRANSFERS.get(word, word[0])
    return Stretch(begin, end, *fill(micro_group), f"{kind}{micro_group}")


def timeline(total: float, lanes: Iterable[tuple[str, Sequence[Stretch]]]) -> Table:
    """Draw when each stream does what.

    Args:
        total: seconds of the step.
        lanes: the name of each stream, and the stretches on it.

    Returns:
        A time axis, a line per lane with the share of the time that it is busy, and the meaning of the letters.
    """
    table, seen = chart(notes=1), set[str]()
    table.add_row("", axis(total), Text(format_seconds(total), "dim"))
    for name, stretches in lanes:
        busy = sum(part.end - part.begin for part in stretches) / total
        table.add_row(name, Strip(total, stretches, IDLE), Text(f"{busy:.0%}", "dim"))
        seen |= {part.label[:1] or part.letter for part in stretches if part.begin < part.end}
    kinds = {letter: word for word, letter in TRANSFERS.items()} | {ELEMENTWISE: "elementwise"}
    words = [f"{letter} {word}" for letter, word in kinds.items() if letter in seen]
    table.add_row("", Text("   ".join(["number: micro-group", *words]), "dim"))
    return table


def axis(total: float) -> Table:
    """Draw a time axis from 0 to `total` seconds, with a label at the begin of each of its equal parts."""
    table = Table.grid(expand=True)
    for _ in range(PARTS):
        table.add_column(ratio=1)
    labels = ["0", *(format_seconds(total * i / PARTS) for i in range(1, PARTS))]
    table.add_row(*(Rule(Text(f"├ {label}", "dim"), align="left", style="dim") for label in labels))
    return table


def profile_chart(profile: ProfileReport | None) -> Iterator[Table]:
    """Draw the seconds of each step of a period, with all periodic work at once and staggered.

    Args:
        profile: None where no work is periodic; then there is no chart.

    Yields:
        The chart, in which a letter marks the way that the plan takes.
    """
    if profile is None:
        return
    table = chart(notes=0, expand=False)
    for name, steps in (("all at once", profile.together), ("staggered", profile.apart)):
        chosen = (name == "staggered") == profile.staggered
        mean, worst = sum(steps) / len(steps), max(steps)
        words = f"worst {format_seconds(worst)}, {worst / mean if mean else 1:.2f} times the mean"
        label = f"{FILLS[0] if chosen else ' '} {name} "
        table.add_row(label, Columns(steps, max(profile.together)), f" {words}", style="" if chosen else "dim")
    yield table
