"""Renders a page as Markdown, as GitHub reads it. It has no charts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from canzona_compile.report.page import Block, Fill, Listing, PageModel, PageTable, Paragraph, Said, Section, text_of

MARKS = {"bold": "**", "code": "`"}


def markdown(page: PageModel) -> str:
    """Write a page."""
    title = [f"## {page.title}"] if page.title else []
    figures = [f"- **{text_of(own.value)}** {own.name.replace(chr(10), ' ')}" for own in page.figures]
    head = [*title, "\n".join(figures), *page.remarks]
    return "\n\n".join([*filter(None, head), *blocks(page.body)]) + "\n"


def blocks(body: Iterable[Block]) -> Iterator[str]:
    """Write blocks that have a blank line between them."""
    for block in body:
        match block:
            case Paragraph():
                yield "".join(map(marked, block.pieces))
            case Listing():
                yield "\n".join(f"- {text_of(name)} {marked(text)}".replace("-  ", "- ") for name, text in block.rows)
            case PageTable():
                yield "\n".join(rows(block))
            case Section():
                if inner := list(blocks(block.body)):
                    yield from (f"### {block.title}", *inner)


def marked(said: Said) -> str:
    """Write a text with its look."""
    mark = "" if isinstance(said, str) or not said.text else MARKS.get(said.style, "")
    return f"{mark}{text_of(said)}{mark}"


def rows(table: PageTable) -> Iterator[str]:
    """Write a table line by line, texts so that they stay in their cells; a chosen row has a bold name."""
    yield f"| {' | '.join(title for title, _ in table.columns)} |"
    yield f"|{'---|' * len(table.columns)}"
    for row, chosen in zip(table.cells, table.choices, strict=True):
        cells = ["" if isinstance(own, Fill) else marked(own).replace("|", "\\|").replace("\n", " ") for own in row]
        name = f"**{cells[0]}**" if chosen else cells[0]
        yield f"| {' | '.join([name, *cells[1:]])} |"
