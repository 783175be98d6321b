"""The parts of texts for terminals: a headline in a panel, titled sections, tables without lines.

Users choose names, so every cell is a `Text` and never markup.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.constrain import Constrain
from rich.padding import Padding
from rich.panel import Panel
from rich.rule import Rule
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from canzona_compile.report.charts import fill
from canzona_compile.report.units import format_bytes, format_flops

MOST_ROWS = 40  # of a table; more are summed up
WIDEST = 120  # columns of a page
IN_ASCII = str.maketrans("█▓▒░·─├…▁▂▃▄▅▆▇▏▎▍▌▋▊▉", "#=%:.-|~_.:-=+*   ####")


@dataclass(frozen=True, slots=True)
class Encodable:
    """A renderable in the letters that the console's encoding has.

    If the encoding is not Unicode, stand-ins replace the letters of charts, and "?" replaces any other missing letter.
    """

    content: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for segment in console.render(self.content, options):
            if options.ascii_only:
                text = segment.text.translate(IN_ASCII).encode(options.encoding, "replace").decode(options.encoding)
                segment = Segment(text, segment.style, segment.control)
            yield segment


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a page. A page leaves a section out if it has no body.

    Attributes:
        title: one word or two.
        caption: a few words on the figures below it; may be empty.
        body: from top to bottom.
    """

    title: str
    caption: str
    body: Iterable[RenderableType]


def page(headline: RenderableType, sections: Iterable[Section]) -> RenderableType:
    """Lay out a page that is at most `WIDEST` columns wide and prints on a terminal of any encoding.

    Args:
        headline: the part above all sections.
        sections: from top to bottom.

    Returns:
        What a console prints.
    """
    parts = [headline]
    for section in sections:
        if body := list(section.body):
            caption = f" ── {section.caption}" if section.caption else ""
            title = Text.assemble(("── ", "dim"), (section.title, "bold"), (caption, "dim"))
            parts += [Text(), Rule(title, align="left", style="dim"), Padding(Group(*body), (0, 0, 0, 2))]
    return Constrain(Encodable(Group(*parts)), WIDEST)


def headline_panel(title: Text, figures: Sequence[tuple[Text, str]], remarks: Iterable[str]) -> Panel:
    """Frame the most important figures.

    Args:
        title: what the page is about.
        figures: each value, and what it counts, in a line or two.
        remarks: lines below the figures; empty ones are left out.

    Returns:
        The panel.
    """
    grid = Table.grid(expand=True)
    for _ in figures:
        grid.add_column(justify="center", ratio=1)
    grid.add_row(*(value for value, _ in figures))
    grid.add_row(*(Text(name, "dim") for _, name in figures))
    lines = [Text(remark, justify="center") for remark in remarks if remark]
    return Panel(Group(grid, Text(), *lines), title=title, title_align="left", border_style="dim")


def columns(*headers: str) -> Table:
    """Begin a table without lines, whose cells keep to one line.

    Args:
        headers: the headers of its columns; a header that begins with > makes its column right-aligned.

    Returns:
        The table without rows.
    """
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for header in headers:
        table.add_column(header.lstrip(">"), justify="right" if header.startswith(">") else "left", no_wrap=True)
    return table


def listing(rows: Iterable[tuple[Text, Text]]) -> Table:
    """List sentences behind bullets or short names. The lines of a long sentence are aligned with its beginning."""
    grid = Table.grid(padding=(0, 1))
    for bullet, sentence in rows:
        grid.add_row(bullet, sentence)
    return grid


def bullets(sentences: Sequence[str]) -> list[RenderableType]:
    """List sentences, each with a bullet; nothing if there are none."""
    return [listing((Text("-"), Text(sentence)) for sentence in sentences)] if sentences else []


def names_by_reason(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Collect the names that share a reason, from pairs of a name and its reason, in order."""
    found: dict[str, list[str]] = defaultdict(list)
    for name, reason in pairs:
        found[reason].append(name)
    return found


def formula_text(formula: str) -> str:
    """Write a sympy expression as people write it: "4 m n^2" for "4*m*n**2"."""
    return formula.replace("**", "^").replace("*", " ")


@dataclass(frozen=True, slots=True)
class MicroGroupRow:
    """A row of the table of micro-groups.

    Attributes:
        index: its number in the step.
        grid: the ranks that share its tasks.
        tasks: how many matrices it has.
        sizes: bytes that ranks send to other ranks: to gather, to scatter and to exchange.
        makespan_flops: FLOPs of its busiest owner.
    """

    index: int
    grid: str
    tasks: int
    sizes: tuple[int, int, int]
    makespan_flops: int


def micro_group_table(rows: Sequence[MicroGroupRow]) -> list[RenderableType]:
    """Show what each micro-group moves and computes. The fill in its row is the legend of all charts.

    Args:
        rows: in the order of the step; one row sums up those after the first `MOST_ROWS`.

    Returns:
        The table and what it leaves out; nothing if there are no micro-groups.
    """
    if not rows:
        return []
    table = columns("", ">#", "grid", ">matrices", ">gather", ">scatter", ">exchange", ">busiest owner")
    for row in rows[:MOST_ROWS]:
        letter, colour = fill(row.index)
        sizes = [format_bytes(size) if size else "-" for size in row.sizes]
        cells = (str(row.index), row.grid, str(row.tasks), *sizes, format_flops(row.makespan_flops))
        table.add_row(Text(letter * 2, colour), *map(Text, cells))
    if hidden := rows[MOST_ROWS:]:
        size = format_bytes(sum(sum(row.sizes) for row in hidden))
        return [table, Text(f"and {len(hidden)} more, {size}", "dim")]
    return [table]
