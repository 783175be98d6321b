"""Renders a page as Markdown, as GitHub reads it. It has no charts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

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
                yield "\n".join(rows([title for title, _ in block.columns], map(named, block.cells, block.choices)))
            case Section():
                if inner := list(blocks(block.body)):
                    yield from (f"### {block.title}", *inner)


def marked(said: Said) -> str:
    """Write a text with its look."""
    mark = "" if isinstance(said, str) or not said.text else MARKS.get(said.style, "")
    return f"{mark}{text_of(said)}{mark}"


def named(row: Sequence[Said | Fill], chosen: bool) -> list[str]:
    """Write the cells of a row, texts so that they stay in theirs; a chosen row has a bold name."""
    cells = ["" if isinstance(own, Fill) else marked(own).replace("|", "\\|").replace("\n", " ") for own in row]
    return [f"**{cells[0]}**", *cells[1:]] if chosen else cells


def rows(headers: Sequence[str], body: Iterable[Sequence[str]]) -> Iterator[str]:
    """Write a table line by line; its cells are Markdown."""
    yield f"| {' | '.join(headers)} |"
    yield f"|{'---|' * len(headers)}"
    for row in body:
        yield f"| {' | '.join(row)} |"
