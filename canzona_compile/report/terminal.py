"""How a report looks on a terminal: reads at 80 columns, without colours and in ASCII too.

Names come from users, so everything is a `Text` and never markup.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile

from rich.align import Align
from rich.console import ConsoleOptions, Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from canzona_compile.analysis.flops import readable, readable_bytes
from canzona_compile.errors import some
from canzona_compile.report.charts import (
    ASCII,
    UNICODE,
    Glyphs,
    assumptions,
    duration,
    load,
    plural,
    profile,
    schedule,
)
from canzona_compile.report.schema import Figures, GridReport, GroupReport, TaskReport, TemplateReport

MOST_ROWS = 40  # of a table; more are summed up
WIDEST = 120  # columns
GAP = 2  # columns between those of a table


def render(report: Figures, options: ConsoleOptions) -> Iterator[RenderableType]:
    """The sections of a report, top to bottom."""
    glyphs = ASCII if options.ascii_only else UNICODE
    width = min(options.max_width, WIDEST)
    yield headline_panel(report, width, glyphs)
    sections: list[tuple[str, str, Iterable[RenderableType]]] = [
        ("Load", "FLOPs per rank and step", load(report, width - 2, glyphs)),
        ("Schedule", assumptions(report), schedule(report, width - 2, glyphs)),
        ("Profile", profile_caption(report), profile(report, width - 2, glyphs)),
        ("Micro-groups", "bytes that leave a rank, all ranks", micro_groups(report, glyphs)),
        ("Tasks", "by owner, largest first", tasks(report, width - 2, glyphs)),
        ("Cost", "FLOPs of one matrix of m x n, and what crosses the wire", costs(report)),
        ("Without communication", "", local(report)),
        ("Interpreted", "the owner runs the optimizer's own eager step", fallbacks(report)),
        ("Suggestions", "", [hanging(Text(glyphs.dot), s) for s in report.suggestions]),
    ]
    for title, caption, body in sections:
        if content := list(body):
            yield Text()
            yield heading(title, caption, width, glyphs)
            yield Padding(Group(*content), (0, 0, 0, 2))


def profile_caption(report: Figures) -> str:
    steps = 0 if report.profile is None else len(report.profile.together)
    return f"computing per step, over a period of {plural(steps, 'step')}"


def heading(title: str, caption: str, width: int, glyphs: Glyphs) -> Text:
    """`── Load ── FLOPs per rank and step ──────────`."""
    text = Text(f"{glyphs.line * 2} ", "dim", no_wrap=True, overflow="ellipsis")
    text.append(title, "bold not dim")
    text.append(f" {glyphs.line * 2} {caption} " if caption else " ")
    return text.append(glyphs.line * max(0, width - text.cell_len))


def headline_panel(report: Figures, width: int, glyphs: Glyphs) -> RenderableType:
    owners = {t.owner for t in report.tasks if t.strategy == "owner"}
    balance = "green" if report.imbalance < 1.1 else "yellow" if report.imbalance < 1.5 else "red"
    everywhere = any(t.owner is None for t in report.tasks)
    groups, collectives = len(report.micro_groups), report.collectives_per_step
    figures = [
        (len(report.tasks), "matrix", "matrices", ""),
        (len(owners) or ("all" if everywhere else "-"), "owner", "owners", ""),
        (groups, "micro-group", "micro-groups", f"{report.depth} in flight" if groups > 1 else ""),
        (collectives, "collective", "collectives", "per step"),
        (f"{report.wire_bytes_per_element:.2f}", "", "wire bytes", "per element"),
        (f"{report.imbalance:.2f}", "", "max / mean", "load"),
    ]
    grid = Table.grid(expand=True)
    for _ in figures:
        grid.add_column(justify="center", ratio=1)
    styles = ["bold"] * 5 + [f"bold {balance}"]
    grid.add_row(*(Text(str(f[0]), style) for f, style in zip(figures, styles, strict=True)))
    grid.add_row(*(Text(f[1] if f[0] == 1 else f[2], "dim") for f in figures))
    grid.add_row(*(Text(f[3], "dim") for f in figures))
    where = "/".join(filter(None, (report.machine.device, report.machine.backend)))
    remarks = [
        f"predicted {duration(report.predicted_seconds)} on {where}",
        plural(report.captures, "capture"),
        f"{len(report.fallbacks)} interpreted",
        report.numerics,
    ]
    lines = Group(grid, Text(), Align.center(Text(f" {glyphs.dot} ".join(remarks))))
    if report.machine.device != "cpu" and report.execution:
        buffers = f"{readable_bytes(report.buffer_bytes)} of buffers"
        lines.renderables.append(Align.center(Text(f"{report.execution} {glyphs.dot} {buffers}")))
    title = Text.assemble(("canzona", "bold"), f"  {report.optimizer} on {plural(report.world_size, 'rank')}")
    return Panel(lines, title=title, title_align="left", border_style="dim", width=width)


def micro_groups(report: Figures, glyphs: Glyphs) -> Iterator[RenderableType]:
    if not report.micro_groups:
        return
    shown = report.micro_groups[:MOST_ROWS]
    rows = [
        [
            str(g.index),
            grid_name(g.grid),
            str(len(g.tasks)),
            *(readable_bytes(n) if n else "-" for n in bytes_of(g)),
            readable(g.makespan_flops),
        ]
        for g in shown
    ]
    table = columns("", ">#", "grid", ">tasks", ">gather", ">scatter", ">exchange", ">busiest owner")
    for g, row in zip(shown, rows, strict=True):
        glyph, colour = glyphs.fill(g.index)
        table.add_row(Text(glyph * 2, colour), *map(Text, row))
    yield table
    if hidden := report.micro_groups[MOST_ROWS:]:
        size = readable_bytes(sum(sum(bytes_of(g)) for g in hidden))
        yield Text(f"and {len(hidden)} more, {size}", "dim")


def bytes_of(group: GroupReport) -> tuple[int, int, int]:
    return group.gather_bytes, group.scatter_bytes, group.exchange_bytes


def grid_name(grid: GridReport) -> str:
    """2x4: 0-7, replicas x shards and their ranks."""
    return f"{grid.replicas}x{grid.shards}: {spans([r for row in grid.ranks for r in row])}"


def spans(ranks: Sequence[int], most: int = 2) -> str:
    """0-3,8; further ones are counted."""
    found: list[list[int]] = []
    for rank in sorted(ranks):
        if found and rank == found[-1][-1] + 1:
            found[-1].append(rank)
        else:
            found.append([rank])
    texts = [str(s[0]) if len(s) == 1 else f"{s[0]}-{s[-1]}" for s in found]
    more = sum(map(len, found[most:]))
    return ",".join(texts[:most]) + (f",+{more}" if more else "")


def tasks(report: Figures, width: int, glyphs: Glyphs) -> Iterator[RenderableType]:
    """Every matrix, or the largest ones where there are too many."""
    if not report.tasks:
        return
    reasons = list(dict.fromkeys((t.strategy, t.reason) for t in report.tasks))
    marks = {r: f" {mark(i)}" if len(reasons) > 1 else "" for i, r in enumerate(reasons)}
    rows = [
        (
            owner if not follows else "",
            t.name,
            "x".join(map(str, t.shape)),
            str(t.micro_group),
            readable(t.flops),
            t.strategy + marks[t.strategy, t.reason],
        )
        if isinstance(t, TaskReport)
        else ("", t, "", "", "", "")
        for owner, t, follows in selected(report.tasks)
    ]
    headers = ("owner", "matrix", ">shape", ">group", ">cost", "strategy")
    sizes = [max(len(row[i]) for row in [*rows, headers]) + GAP for i in (0, 2, 3, 4, 5)]
    room = max(16, width - sum(sizes))
    before, after = common([row[1] for row in rows if row[5]], room)
    table = columns(*headers)
    for owner, name, *cells in rows:
        if not cells[-1]:
            table.add_row("", Text(f"  {name}", "dim"))
            continue
        name = shorten(name[before : len(name) - after], room, glyphs)
        table.add_row(Text(owner, "bold"), Text(name), *map(Text, cells))
    yield table
    if before or after:
        name = report.tasks[0].name
        around = f"{name[:before]}{glyphs.cut}{name[len(name) - after :]}"
        yield Text(f"names in full: {around}", "dim")
    for reason in reasons:
        count = sum((t.strategy, t.reason) == reason for t in report.tasks)
        which = f"{reason[0]}{marks[reason]}"
        yield Text(f"{which} ({count}): {reason[1] or 'no reason given'}", "dim")


def selected(tasks: Sequence[TaskReport]) -> Iterator[tuple[str, TaskReport | str, bool]]:
    """About MOST_ROWS rows: owner, task or remark, whether the row above has the same owner."""
    order = sorted(tasks, key=lambda t: -t.flops)
    by_owner: dict[int, list[TaskReport]] = defaultdict(list)
    for task in order:
        by_owner[-1 if task.owner is None else task.owner].append(task)
    if len(tasks) > MOST_ROWS < 2 * len(by_owner):  # no room for two rows per owner
        for task in order[:MOST_ROWS]:
            yield owner_name(task), task, False
        yield "", remark(order[MOST_ROWS:]), False
        return
    each = MOST_ROWS if len(tasks) <= MOST_ROWS else MOST_ROWS // len(by_owner) - 1
    for _, found in sorted(by_owner.items()):
        shown = found if len(found) == each + 1 else found[:each]
        for i, task in enumerate(shown):
            yield owner_name(task), task, i > 0
        if len(shown) < len(found):
            yield "", remark(found[len(shown) :]), True


def remark(tasks: Sequence[TaskReport]) -> str:
    return f"and {len(tasks)} more, {readable(sum(t.flops for t in tasks))}"


def mark(i: int) -> str:
    """a, b, ..., z, a2, ..."""
    return chr(ord("a") + i % 26) + (str(i // 26 + 1) if i >= 26 else "")


def owner_name(task: TaskReport) -> str:
    return "every rank" if task.owner is None else f"rank {task.owner}"


def common(names: Sequence[str], room: int) -> tuple[int, int]:
    """Characters at both ends, up to dots, that all names share; none if all names fit."""
    if len(names) < 2 or max(map(len, names)) <= room:
        return 0, 0
    first = names[0]
    before = first.rfind(".", 0, shared(names)) + 1
    dot = first.find(".", len(first) - shared([name[::-1] for name in names]))
    after = len(first) - dot if dot >= 0 else 0
    return (before, after) if before + after < min(map(len, names)) else (before, 0)


def shared(names: Sequence[str]) -> int:
    """Characters with which all names begin."""
    return len(list(takewhile(lambda letters: len(set(letters)) == 1, zip(*names, strict=False))))


def shorten(name: str, width: int, glyphs: Glyphs) -> str:
    """The end of a long name: it says more than the beginning."""
    return name if len(name) <= width else glyphs.cut + name[len(name) - width + 1 :]


def costs(report: Figures) -> Iterator[RenderableType]:
    """Templates that have matrices, and the formulas that they share."""
    found = [t for t in report.templates if t.tasks]
    formulas = list(dict.fromkeys(map(formula, found)))
    table = columns("", "template", ">tasks", ">each", "gather", "scatter")
    for t in found:
        way = [crossing(t, direction) for direction in ("gather", "scatter")]
        cells = [t.name, str(t.tasks), readable(t.flops), *way]
        table.add_row(Text(mark(formulas.index(formula(t))), "bold"), *map(Text, cells))
    if found:
        yield table
    for i, text in enumerate(formulas):
        yield hanging(Text(f"{mark(i)} =", "bold"), text)
    homes: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for t in found:
        homes[t.resident].append(t.name)
    for state, names in homes.items():
        if state:
            yield Text(f"only on the owner: {', '.join(state)} of {some(names)}", "dim")


def formula(template: TemplateReport) -> str:
    """10 m^3 + 20 m^2 n, or that nobody knows."""
    if template.interpreted:
        return f"interpreted, elements counted: {template.interpreted}"
    return template.formula.replace("**", "^").replace("*", " ")


def crossing(template: TemplateReport, direction: str) -> str:
    """bf16 8 KiB."""
    found = [w for w in template.wires if w.direction == direction]
    dtypes = [w.dtype.replace("bfloat", "bf").replace("float", "f") for w in found]
    size = readable_bytes(sum(w.bytes for w in found))
    return f"{'+'.join(dict.fromkeys(dtypes))} {size}" if found else "-"


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


def hanging(bullet: Text, sentence: str) -> RenderableType:
    grid = Table.grid(padding=(0, 1))
    grid.add_row(bullet, Text(sentence))
    return grid


def columns(*headers: str) -> Table:
    """A table without lines; a header that begins with > is of a right-aligned column."""
    table = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False, header_style="dim")
    for header in headers:
        right = header.startswith(">")
        table.add_column(header.lstrip(">"), justify="right" if right else "left", no_wrap=True)
    return table
