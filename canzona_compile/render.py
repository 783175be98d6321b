"""How a report looks on a terminal: reads at 80 columns, without colours and in ASCII too.

Every micro-group has a colour and a filling, the same in the load bars, in the schedule and in the
table that is their legend. Names come from users, so everything is a `Text` and never markup.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich.align import Align
from rich.console import ConsoleOptions, Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from canzona_compile.cost import rates_of, readable, readable_bytes
from canzona_compile.errors import some
from canzona_compile.figures import Figures, GridReport, LoadReport, Moment, TaskReport

MOST_ROWS = 40  # of a table; more are summed up
MOST_BARS = 32  # ranks with a bar of their own; more make a histogram
WIDEST = 120  # columns
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

    def fill(self, group: int) -> tuple[str, str]:
        """The filling and the colour of a micro-group."""
        return self.fills[group % len(self.fills)], COLOURS[group % len(COLOURS)]


UNICODE = Glyphs("█▓▒░", "·", "─", "┬", "╯", "·", "…")
ASCII = Glyphs("#=%+", ".", "-", "+", "'", "|", "~")


def render(report: Figures, options: ConsoleOptions) -> Iterator[RenderableType]:
    """The sections of a report, top to bottom."""
    glyphs = ASCII if options.ascii_only else UNICODE
    width = min(options.max_width, WIDEST)
    yield headline_panel(report, width, glyphs)
    sections: list[tuple[str, str, Iterable[RenderableType]]] = [
        ("Load", "FLOPs per rank and step", load(report, width - 2, glyphs)),
        ("Schedule", schedule_caption(report, glyphs), schedule(report, width - 2, glyphs)),
        ("Micro-groups", "bytes that leave a rank, all ranks", micro_groups(report, glyphs)),
        ("Tasks", "by owner, largest first", tasks(report, width - 2, glyphs)),
        ("Cost", "FLOPs of one matrix of m x n, and what crosses the wire", costs(report)),
        ("Without communication", "", local(report)),
        ("Interpreted", "the owner runs the optimizer's own eager step", fallbacks(report)),
        ("Suggestions", "", ([Text(f"{glyphs.dot} {s}")] for s in ())),
    ]
    sections[-1] = ("Suggestions", "", [hanging(s, glyphs) for s in report.suggestions])
    for title, caption, body in sections:
        if content := list(body):
            yield Text()
            yield heading(title, caption, width, glyphs)
            yield Padding(Group(*content), (0, 0, 0, 2))


def heading(title: str, caption: str, width: int, glyphs: Glyphs) -> Text:
    """`── Load ── FLOPs per rank and step ──────────`."""
    text = Text(f"{glyphs.line * 2} ", "dim", no_wrap=True, overflow="ellipsis")
    text.append(title, "bold not dim")
    text.append(f" {glyphs.line * 2} {caption} " if caption else " ")
    return text.append(glyphs.line * max(0, width - text.cell_len))


def headline_panel(report: Figures, width: int, glyphs: Glyphs) -> RenderableType:
    owners = {t.owner for t in report.tasks if t.strategy == "owner"}
    load = "green" if report.imbalance < 1.1 else "yellow" if report.imbalance < 1.5 else "red"
    figures = [
        (str(len(report.tasks)), "matrices", "", "bold"),
        (str(len(owners)) if owners else "-", "owners", "", "bold"),
        (str(len(report.micro_groups)), "micro-groups", f"{report.depth} in flight", "bold"),
        (str(report.collectives_per_step), "collectives", "per step", "bold"),
        (f"{report.wire_bytes_per_element:.2f}", "wire bytes", "per element", "bold"),
        (f"{report.imbalance:.2f}", "max / mean", "load", f"bold {load}"),
    ]
    grid = Table.grid(expand=True)
    for _ in figures:
        grid.add_column(justify="center", ratio=1)
    grid.add_row(*(Text(value, style) for value, _, _, style in figures))
    grid.add_row(*(Text(above, "dim") for _, above, _, _ in figures))
    grid.add_row(*(Text(below, "dim") for _, _, below, _ in figures))
    where = "/".join(filter(None, (report.machine.device, report.machine.backend)))
    remarks = [
        f"predicted {duration(report.predicted_seconds)} per step on {where}",
        plural(report.captures, "capture"),
        f"{len(report.fallbacks) or 'nothing'} interpreted",
        f"numerics {report.numerics}",
    ]
    lines = Group(grid, Text(), Align.center(Text(f" {glyphs.dot} ".join(remarks))))
    title = Text.assemble(
        ("canzona", "bold"), f"  {report.optimizer} on {plural(report.world_size, 'rank')}"
    )
    return Panel(lines, title=title, title_align="left", border_style="dim", width=width)


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
    notes = [
        f" {readable(one.flops):>12} {deviation(one.flops, mean):>5}  {plural(one.tasks, 'matrix', 'matrices')}"
        for one in loads
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
    yield line.append(f"        max/mean {report.imbalance:.2f}", "bold not dim")


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


def schedule_caption(report: Figures, glyphs: Glyphs) -> str:
    rates = rates_of(report.machine)
    assumed = f"assuming {readable(rates.flops)}/s, {readable_bytes(rates.wire)}/s"
    return f"{assumed}, {duration(rates.latency)} a collective"


def schedule(report: Figures, width: int, glyphs: Glyphs) -> Iterator[RenderableType]:
    """What the processor and the link of the busiest rank do when."""
    total = report.predicted_seconds
    if not total:
        return
    left, right = len("compute "), len(" 100%")
    room = max(20, width - left - right)
    streams = {"compute": "compute", "link": "link"}
    transfers = [m for m in report.schedule if m.stream == "link"]
    rule, labels = axis(total, room, glyphs)
    yield Text(" " * left + labels, "dim", no_wrap=True)
    yield Text(" " * left + rule, "dim", no_wrap=True)
    for stream, label in streams.items():
        blocks = [m for m in report.schedule if m.stream == stream and m.act.split()[0] != "wait"]
        busy = sum(m.end - m.start for m in blocks) / total
        line = Text(f"{label:<{left}}", no_wrap=True)
        line.append(lane(blocks, total, room, glyphs))
        yield line.append(f" {busy:>4.0%}", "dim")
    words = ["number: micro-group"]
    words += [f"{w[0]}: {w}" for w in ("gather", "scatter") if any(w in m.act for m in transfers)]
    words += ["x: exchange"] if any("exchange" in m.act for m in transfers) else []
    if transfers and not rates_of(report.machine).overlap:
        words.append("the link takes the cores that compute")
    yield Text(" " * left + "   ".join(words), "dim")


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
        if end - begin >= len(label) + 2:
            at = begin + (end - begin - len(label)) // 2
            cells[at : at + len(label)] = [(c, f"bold {colour}") for c in label]
    text = Text()
    for glyph, style in cells:
        text.append(glyph, style)
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


def micro_groups(report: Figures, glyphs: Glyphs) -> Iterator[RenderableType]:
    if not report.micro_groups:
        return
    table = plain_table()
    for name, justify in (("", "left"), ("#", "right"), ("grid", "left"), ("tasks", "right")):
        table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for name in ("gather", "scatter", "exchange", "busiest owner", "coll."):
        table.add_column(name, justify="right", no_wrap=True)
    shown = report.micro_groups[:MOST_ROWS]
    for g in shown:
        glyph, colour = glyphs.fill(g.index)
        sent = (g.gather_bytes, g.scatter_bytes, g.exchange_bytes)
        table.add_row(
            Text(glyph * 2, colour),
            str(g.index),
            Text(grid_name(g.grid)),
            str(len(g.tasks)),
            *(readable_bytes(n) if n else "-" for n in sent),
            readable(g.makespan_flops),
            str(g.collectives) if g.collectives else "-",
        )
    yield table
    if hidden := report.micro_groups[MOST_ROWS:]:
        size = sum(g.gather_bytes + g.scatter_bytes + g.exchange_bytes for g in hidden)
        yield Text(f"and {len(hidden)} more, {readable_bytes(size)}", "dim")


def grid_name(grid: GridReport) -> str:
    """2x4, ranks 0-7."""
    return f"{grid.replicas}x{grid.shards}, ranks {spans([r for row in grid.ranks for r in row])}"


def spans(ranks: Sequence[int], most: int = 3) -> str:
    """0-3,8,10-12; the rest is counted."""
    found: list[list[int]] = []
    for rank in sorted(ranks):
        if found and rank == found[-1][-1] + 1:
            found[-1].append(rank)
        else:
            found.append([rank])
    texts = [str(s[0]) if len(s) == 1 else f"{s[0]}-{s[-1]}" for s in found]
    more = sum(map(len, found[most:]))
    return ",".join(texts[:most]) + (f" and {more} more" if more else "")


def tasks(report: Figures, width: int, glyphs: Glyphs) -> Iterator[RenderableType]:
    """Every matrix, or the largest ones where there are too many."""
    if not report.tasks:
        return
    reasons = list(dict.fromkeys((t.strategy, t.reason) for t in report.tasks))
    marks = {reason: mark(i) for i, reason in enumerate(reasons)}
    by_owner: dict[tuple[int, str], list[TaskReport]] = defaultdict(list)
    for task in sorted(report.tasks, key=lambda t: -t.flops):
        by_owner[-1 if task.owner is None else task.owner, owner_name(task)].append(task)
    each = max(1, MOST_ROWS // len(by_owner))
    if len(report.tasks) <= MOST_ROWS:
        each = MOST_ROWS
    table = plain_table()
    rows: list[tuple[str, ...]] = []
    hidden = 0
    for (_, owner), found in sorted(by_owner.items())[:MOST_ROWS]:
        shown = found if len(found) == each + 1 else found[:each]
        for i, t in enumerate(shown):
            why = t.strategy if len(reasons) == 1 else f"{t.strategy} {marks[t.strategy, t.reason]}"
            dims = "x".join(map(str, t.shape))
            group = str(t.micro_group)
            rows.append((owner if i == 0 else "", t.name, dims, group, readable(t.flops), why))
        if rest := found[len(shown) :]:
            rows.append(("", f"and {len(rest)} more", "", "", readable(sum(t.flops for t in rest)), ""))
    columns = ("owner", "matrix", "shape", "group", "cost", "strategy")
    others = sum(max(len(row[i]) for row in [*rows, columns]) for i in (0, 2, 3, 4, 5)) + 2 * 5
    for i, name in enumerate(columns):
        table.add_column(name, justify="right" if i in (2, 3, 4) else "left", no_wrap=True)
    for row in rows:
        name = row[1] if row[5] else f"  {row[1]}"
        style = "" if row[5] else "dim"
        cells = [row[0], shorten(name, max(16, width - others), glyphs), *row[2:]]
        table.add_row(*(Text(c, "bold" if i == 0 else style) for i, c in enumerate(cells)))
    yield table
    if len(by_owner) > MOST_ROWS:
        rest = [t for _, found in sorted(by_owner.items())[MOST_ROWS:] for t in found]
        hidden = len(by_owner) - MOST_ROWS
        yield Text(f"and {plural(len(rest), 'matrix', 'matrices')} of {hidden} more owners", "dim")
    for strategy, reason in reasons:
        count = sum((t.strategy, t.reason) == (strategy, reason) for t in report.tasks)
        which = strategy if len(reasons) == 1 else f"{strategy} {marks[strategy, reason]}"
        yield Text(f"{which} ({count}): {reason or 'no reason given'}", "dim")


def mark(i: int) -> str:
    """a, b, ..., z, a2, ..."""
    return chr(ord("a") + i % 26) + (str(i // 26 + 1) if i >= 26 else "")


def owner_name(task: TaskReport) -> str:
    return "every rank" if task.owner is None else f"rank {task.owner}"


def shorten(name: str, width: int, glyphs: Glyphs) -> str:
    """The end of a long name: it says more than the beginning."""
    return name if len(name) <= width else glyphs.cut + name[len(name) - width + 1 :]


def costs(report: Figures) -> Iterator[RenderableType]:
    for t in report.templates:
        if not t.tasks:
            continue
        line = Text(t.name, "bold")
        yield line.append(
            f"  {readable(t.flops)} each, {plural(t.tasks, 'matrix', 'matrices')}", "not bold"
        )
        formula = t.formula.replace("**", "^").replace("*", " ")
        details = [Text(formula if not t.interpreted else f"interpreted: {t.interpreted}")]
        for w in t.wires:
            dims = "x".join(map(str, w.shape))
            details.append(Text(f"{w.direction} {w.name}: {dims} {w.dtype}, {readable_bytes(w.bytes)}", "dim"))
        if t.resident:
            details.append(Text(f"on the owner only: {', '.join(t.resident)}", "dim"))
        yield Padding(Group(*details), (0, 0, 0, 2))


def local(report: Figures) -> Iterator[RenderableType]:
    whys: dict[str, list[str]] = defaultdict(list)
    for one in report.local:
        dims = "x".join(map(str, one.shape)) or "scalar"
        whys[one.why].append(f"{one.name} {dims}")
    for why, names in whys.items():
        yield Text.assemble((f"{plural(len(names), 'parameter')}: {why}", "bold"))
        yield Padding(Text(some(names, 4), "dim"), (0, 0, 0, 2))


def fallbacks(report: Figures) -> Iterator[RenderableType]:
    reasons: dict[str, list[str]] = defaultdict(list)
    for name, reason in report.fallbacks.items():
        reasons[reason].append(name)
    for reason, names in reasons.items():
        yield Text(f"{plural(len(names), 'matrix', 'matrices')}: {some(names, 4)}", "yellow")
        yield Padding(Text(reason, "dim"), (0, 0, 0, 2))


def hanging(sentence: str, glyphs: Glyphs) -> RenderableType:
    grid = Table.grid(padding=(0, 1))
    grid.add_row(Text(glyphs.dot), Text(sentence))
    return grid


def plain_table() -> Table:
    return Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")


def plural(count: int, one: str, many: str = "") -> str:
    """1 rank, 2 ranks."""
    return f"{count} {one if count == 1 else many or one + 's'}"


UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))


def duration(seconds: float) -> str:
    """4.9 ms."""
    size, unit = next(((s, u) for s, u in UNITS if seconds >= s), UNITS[-1])
    return f"{seconds / size:.3g} {unit}"
