"""Renders a page for a terminal, by `rich`. Users choose names, so every text is a `Text` and never markup."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.constrain import Constrain
from rich.measure import Measurement
from rich.padding import Padding
from rich.panel import Panel
from rich.rule import Rule
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from canzona_compile.report.page import (
    Bars,
    Block,
    Detail,
    Fill,
    Listing,
    PageModel,
    PageTable,
    Paragraph,
    Said,
    Section,
    Timeline,
)
from canzona_compile.report.terminal_charts import FILLS, bars, fill, timeline

WIDEST = 120  # columns of a page with a headline
ANY_WIDTH = 10_000  # columns; more than any table needs
SHORTEST_NAME = 8  # letters of a name on one line
IN_ASCII = str.maketrans("█▓▒░·─├…▁▂▃▄▅▆▇▏▎▍▌▋▊▉", "#=%:.-|~_.:-=+*   ####")
PLAIN = {"code": "", "formula": ""}  # styles that a terminal does not have


def render(page: PageModel) -> RenderableType:
    """Lay out a page."""
    headline = [panel(page)] if page.kind else []
    return Constrain(Encodable(Group(*headline, *rendered(page.body))), WIDEST if page.kind else None)


def printed(renderable: RenderableType, width: int) -> str:
    """Render something without colours, `width` columns wide."""
    console = Console(file=io.StringIO(), width=width, color_system=None, legacy_windows=False)
    console.print(renderable)
    assert isinstance(console.file, io.StringIO)
    return "".join(f"{line.rstrip()}\n" for line in console.file.getvalue().splitlines())


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


def panel(page: PageModel) -> Panel:
    """Frame the key figures and the remarks."""
    figures = [figure for figure in page.figures if not figure.detail]
    grid = Table.grid(expand=True)
    for _ in figures:
        grid.add_column(justify="center", ratio=1)
    grid.add_row(*(text(figure.value, "bold") for figure in figures))
    grid.add_row(*(Text(figure.name, "dim") for figure in figures))
    remarks = [Text(remark, justify="center") for remark in page.remarks if remark]
    title = Text.assemble((page.kind, "bold"), f"  {page.title}")
    return Panel(Group(grid, Text(), *remarks), title=title, title_align="left", border_style="dim")


def rendered(body: Iterable[Block], nested: bool = False) -> Iterator[RenderableType]:
    """Render blocks; those in a section are nested."""
    for block in body:
        match block:
            case Paragraph():
                yield indented(Text.assemble(*map(text, block.pieces)), block.indent)
            case Listing():
                yield indented(listing(block), block.indent)
            case PageTable():
                whole = table(block, block.cells) if block.names is None else NamedTable(block, block.names)
                yield Padding(whole, (0, 0, 0, block.indent), expand=False) if block.indent else whole
            case Bars():
                yield bars(block)
                if block.of:
                    yield from rendered([block.summary])
            case Timeline():
                yield timeline(block)
            case Section():
                if inner := list(rendered(block.body, nested=True)):
                    yield from (Text(block.title, "bold"), *inner) if nested else titled(block, inner)
            case Detail():
                pass


def titled(section: Section, body: Sequence[RenderableType]) -> Sequence[RenderableType]:
    caption = f" ── {section.caption}" if section.caption else ""
    title = Text.assemble(("── ", "dim"), (section.title, "bold"), (caption, "dim"))
    return Text(), Rule(title, align="left", style="dim"), indented(Group(*body), 2)


def indented(content: RenderableType, columns: int) -> RenderableType:
    return Padding(content, (0, 0, 0, columns)) if columns else content


def text(said: Said, more_style: str = "") -> Text:
    """A text with its look."""
    if isinstance(said, str):
        return Text(said, more_style)
    style = f"{more_style} {PLAIN.get(said.style, said.style)}".strip()
    found = Text(said.text, style)
    return Text.assemble(found, (f"  {said.remark}", "dim")) if said.remark else found


# -- tables ------------------------------------------------------------------------------------


def table(content: PageTable, cells: Sequence[Sequence[Said | Fill]]) -> Table:
    """Lay out a table with these cells. A mark and bold letters show the row that is chosen.

    Without a frame there are no lines. Cells keep to one line, except in a frame, of names, and of what may go on.
    """
    if content.framed:
        made = Table(title=Text(content.title, "italic"), title_justify="left")
    else:
        made = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    made.show_header = not content.bare
    for title, unit in [*([("", "")] if content.chosen else []), *content.columns]:
        number = len(made.columns)
        wraps = content.framed or unit == "~" or number == content.names
        made.add_column(
            title,
            justify="left" if unit in ("", "~") else "right",
            no_wrap=not wraps,
            overflow="fold" if wraps else "ellipsis",
            min_width=SHORTEST_NAME if number == content.names else None,
        )
    for column, width in zip(made.columns, content.least, strict=False):
        column.min_width = width
    for row, chosen in zip(cells, content.choices, strict=True):
        mark = [Text(FILLS[0] if chosen else "", "green")] if content.chosen else []
        made.add_row(*mark, *(cell(one, "bold" if chosen else "") for one in row))
    return made


def cell(content: Said | Fill, more_style: str) -> Text:
    if isinstance(content, Fill):
        letter, colour = fill(content.number)
        return Text(letter * 2, colour)
    return text(content, more_style)


@dataclass(frozen=True, slots=True)
class NamedTable:
    """A table of names.

    If they are too long for the console, the table leaves out the words that all names share. A name that is still too
    long goes on in the next line.
    """

    content: PageTable
    column: int

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        cells = self.content.cells
        whole = table(self.content, cells)
        room = options.update_width(ANY_WIDTH)
        names = [row[self.column] for row in cells if isinstance(row[self.column], str)]
        begin, end = differing([str(name) for name in names])
        if not (begin or end) or Measurement.get(console, room, whole).maximum <= options.max_width:
            yield whole
            return
        words = str(names[0]).split(".")
        for row in cells:
            if isinstance(name := row[self.column], str):
                row[self.column] = ".".join(name.split(".")[begin:end])
        yield table(self.content, cells)
        around = ".".join([*words[:begin], "…", *(words[end:] if end else ())])
        yield Text(f"names in full: {around}", "dim")


def differing(names: Sequence[str]) -> tuple[int, int | None]:
    """Find the words in which dotted names differ, at least one word of each name.

    Returns:
        Where it begins and ends in the list of a name's words; (0, None) for a single name.
    """
    if len(names) < 2:
        return 0, None
    words = [name.split(".") for name in names]
    begin = shared([own[:-1] for own in words])
    return begin, -shared([own[:begin:-1] for own in words]) or None


def shared(names: Sequence[Sequence[str]]) -> int:
    """Count the words with which all names begin."""
    return len(list(takewhile(lambda words: len(set(words)) == 1, zip(*names, strict=False))))


def listing(content: Listing) -> Table:
    """List sentences. The lines of a long one are aligned with its beginning."""
    grid = Table.grid(padding=(0, 1))
    for name, sentence in content.rows:
        grid.add_row(text(name or "-"), text(sentence))
    return grid
