"""The charts of a report: who computes how much, what happens when, and how long each step of a period lasts.

Every micro-group has a colour and a filling, the same in all charts and in the table of
micro-groups, which is their legend. Nothing depends on colour or on Unicode.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.console import RenderableType
from rich.text import Text

from canzona_compile.analysis.flops import readable
from canzona_compile.analysis.step_time import rates_of
from canzona_compile.report.schema import Figures, LoadReport, Moment

MOST_BARS = 32  # ranks with a bar of their own; more make a histogram
COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "red")


@dataclass(frozen=True, slots=True)
class Glyphs:
    """What things are drawn with."""

    fills: str  # one per micro-group, again and again
    idle: str
    line: str
    tick: str
    corner: str
    dot: str  # between two remarks
    cut: str  # where a name was shortened
    levels: str  # from little to all

    def fill(self, group: int) -> tuple[str, str]:
        """The filling and the colour of a micro-group."""
        return self.fills[group % len(self.fills)], COLOURS[group % len(COLOURS)]


UNICODE = Glyphs("█▓▒░", "·", "─", "┬", "╯", "·", "…", "▁▂▃▄▅▆▇█")
ASCII = Glyphs("#=%+", ".", "-", "+", "'", "|", "~", "_.:-=+*#")


def load(report: Figures, width: int, glyphs: Glyphs) -> Iterator[RenderableType]:
    """A bar per rank, or how many ranks have which load."""
    loads = report.loads
    if not loads:
        return
    mean = sum(one.flops for one in loads) / len(loads)
    if len(loads) > MOST_BARS:
        yield from histogram(loads, width, glyphs)
        yield Text.assemble(
            f"mean {readable(mean)}, max {readable(max(one.flops for one in loads))}, ",
            (f"max/mean {report.imbalance:.2f}", "bold"),
        )
        return
    labels = [f"rank {one.rank}" for one in loads]
    counts = [plural(one.tasks, "matrix", "matrices") for one in loads]
    notes = [
        f" {readable(one.flops):>12} {deviation(one.flops, mean):>5}  {count:>11}"
        for one, count in zip(loads, counts, strict=True)
    ]
    left = max(map(len, [*labels, "mean"])) + 1
    room = max(10, width - left - max(map(len, notes)))
    scale = room / max(one.flops for one in loads)
    for one, label, note in zip(loads, labels, notes, strict=True):
        line = Text(f"{label:<{left}}", no_wrap=True)
        line.append(bar(one, scale, glyphs))
        line.append(" " * (left + room - line.cell_len))
        yield line.append(note)
    mark = max(1, round(mean * scale))
    line = Text(f"{'mean':<{left}}", "dim", no_wrap=True)
    line.append(f"{glyphs.line * (mark - 1)}{glyphs.corner}{' ' * (room - mark)}")
    line.append(f" {readable(mean):>12}", "not dim")
    yield line.append(f"  max/mean {report.imbalance:.2f}", "bold not dim")


def bar(one: LoadReport, scale: float, glyphs: Glyphs) -> Text:
    """FLOPs of a rank, a stretch per micro-group."""
    text, done = Text(), 0
    for group, flops in one.by_group.items():
        glyph, colour = glyphs.fill(group)
        done += flops
        text.append(glyph * (round(done * scale) - text.cell_len), colour)
    return text


def deviation(value: float, mean: float) -> str:
    """+4%, or nothing within half a percent."""
    percent = round(100 * (value / mean - 1)) if mean else 0
    return f"{percent:+d}%" if percent else ""


def histogram(loads: Sequence[LoadReport], width: int, glyphs: Glyphs) -> Iterator[Text]:
    """Ranks by load in up to eight equal classes."""
    low, high = min(one.flops for one in loads), max(one.flops for one in loads)
    classes = 8 if high > low else 1
    step = (high - low) / classes
    counts = [0] * classes
    for one in loads:
        counts[min(classes - 1, int((one.flops - low) / step)) if step else 0] += 1
    labels = [
        readable(low) if classes == 1 else f"{readable(low + i * step)} to {readable(low + (i + 1) * step)}"
        for i in range(classes)
    ]
    left = max(map(len, labels)) + 1
    room = max(10, width - left - 11)
    for label, count in zip(labels, counts, strict=True):
        line = Text(f"{label:>{left - 1}} ", no_wrap=True)
        line.append(glyphs.fills[0] * math.ceil(room * count / max(counts)), COLOURS[0])
        yield line.append(f" {plural(count, 'rank')}" if count else " -")


def assumptions(report: Figures) -> str:
    rates = rates_of(report.machine, tuple(one.rank for one in report.loads))
    flops = readable(rates.flops).replace(".00 ", " ")
    return f"assuming {flops}/s, {rates.wire / 1e9:g} GB/s, {duration(rates.latency)} a collective"


def schedule(report: Figures, width: int, glyphs: Glyphs) -> Iterator[RenderableType]:
    """What the processor and the link of the busiest rank do when."""
    total = report.predicted_seconds
    transfers = [m for m in report.schedule if m.stream == "link"]
    if not transfers:
        return
    left, right = len("compute "), len(" 100%")
    room = max(20, width - left - right)
    rule, labels = axis(total, room, glyphs)
    yield Text(" " * left + labels, "dim", no_wrap=True)
    yield Text(" " * left + rule, "dim", no_wrap=True)
    for stream in ("compute", "link"):
        blocks = [m for m in report.schedule if m.stream == stream and m.act.split()[0] != "wait"]
        busy = sum(m.end - m.start for m in blocks) / total
        line = Text(f"{stream:<{left}}", no_wrap=True)
        line.append(lane(blocks, total, room, glyphs))
        yield line.append(f" {busy:>4.0%}", "dim")
    names = {"g": "gather", "s": "scatter", "x": "exchange"}
    words = [f"{k} {w}" for k, w in names.items() if any(kind(m) == k for m in transfers)]
    yield Text(" " * left + "   ".join(["number: micro-group", *words]), "dim")
    if not rates_of(report.machine).overlap:
        yield Text(" " * left + "communication takes the cores that compute: no overlap", "dim")


def profile(report: Figures, width: int, glyphs: Glyphs) -> Iterator[RenderableType]:
    """A column per step of a period, with and without staggering."""
    both = report.profile
    if both is None:
        return
    rows = {"all at once": both.together, "staggered": both.apart}
    left, most = max(map(len, rows)) + 4, max(both.together)
    for label, steps in rows.items():
        this = (label == "staggered") == both.staggered
        mean, worst = sum(steps) / len(steps), max(steps)
        line = Text(f"{glyphs.fills[0] if this else ' '} {label:<{left - 2}}", "" if this else "dim", no_wrap=True)
        line.append(columns(steps, most, width - left - 34, glyphs), COLOURS[0])
        line.append(f"  worst {duration(worst)}, {worst / mean if mean else 1:.2f} times the mean")
        yield line


def columns(values: Sequence[float], most: float, room: int, glyphs: Glyphs) -> str:
    """Values as heights; if there are too many, the largest of neighbours."""
    each = max(1, math.ceil(len(values) / max(8, room)))
    tops = [max(values[i : i + each]) for i in range(0, len(values), each)]
    last = len(glyphs.levels) - 1
    return "".join(glyphs.levels[round(last * top / most) if most else 0] for top in tops)


def lane(blocks: Sequence[Moment], total: float, width: int, glyphs: Glyphs) -> Text:
    """Blocks of one stream where they happen, labelled where there is room."""
    cells = [(glyphs.idle, "dim")] * width
    for block in blocks:
        if block.end <= block.start:
            continue
        begin = min(width - 1, round(block.start / total * width))
        end = max(begin + 1, round(block.end / total * width))
        glyph, colour = glyphs.fill(block.micro_group)
        cells[begin:end] = [(glyph, colour)] * (end - begin)
        label = f"{kind(block)}{block.micro_group}"
        if end - begin >= len(label) + 4:
            label = f" {label} "
        if end - begin >= max(2, len(label)):
            at = begin + (end - begin - len(label)) // 2
            cells[at : at + len(label)] = [(c, f"bold {colour}") for c in label]
    text = Text()
    for style, run in groupby(cells, key=lambda cell: cell[1]):
        text.append("".join(glyph for glyph, _ in run), style)
    return text


def kind(block: Moment) -> str:
    """g, s or x for a transfer, nothing for a computation."""
    if block.stream == "compute":
        return ""
    word = block.act.split()[-1]
    return "x" if word == "exchange" else word[0]


def axis(total: float, width: int, glyphs: Glyphs) -> tuple[str, str]:
    """A time axis of `width` columns and `total` seconds: the rule and the labels above it."""
    size, unit = next((s, u) for s, u in UNITS if total >= s or u == UNITS[-1][1])
    end = f"{total / size:.3g} {unit}"
    rough = total / size / max(1, width // 14)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(f * power for f in (1, 2, 5, 10) if f * power >= rough * (1 - 1e-9))
    rule, labels = [glyphs.line] * width, [" "] * width
    for i in range(int(total / size / step) + 1):
        at = round(i * step * size / total * width)
        text = f"{i * step:.6g}"
        if at + len(text) < width - len(end):
            rule[at] = glyphs.tick
            labels[at : at + len(text)] = text
    labels[width - len(end) :] = end
    rule[-1] = glyphs.tick
    return "".join(rule), "".join(labels)


def plural(count: int, one: str, many: str = "") -> str:
    """1 rank, 2 ranks."""
    return f"{count} {one if count == 1 else many or one + 's'}"


UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))


def duration(seconds: float) -> str:
    """4.9 ms."""
    size, unit = next(((s, u) for s, u in UNITS if seconds >= s), UNITS[-1])
    return f"{seconds / size:.3g} {unit}"
