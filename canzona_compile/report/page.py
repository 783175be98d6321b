"""A page as plain data: sections of notes, lists, tables and charts.

Nothing here knows what a page is about, or how it is shown. `run_page` and `tools.planning.plan_page` build pages;
`terminal`, `markdown` and `html` render them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from canzona_compile.report.units import format_quantity


@dataclass(frozen=True, slots=True)
class Words:
    """A text with a look. Nothing in it is markup.

    Attributes:
        style: "bold", "dim", "code", "formula" or a colour.
    """

    text: str
    style: str = ""
    remark: str = ""
    about: str = ""


@dataclass(frozen=True, slots=True)
class Fill:
    """As a cell: the look that a numbered thing has in the charts of the page."""

    number: int


Said = str | Words
Cell = Said | Fill | float | None  # a number in the unit of its column; None where there is none


@dataclass(frozen=True, slots=True)
class Paragraph:
    """A sentence, in pieces of one look each."""

    pieces: tuple[Said, ...]
    indent: int = 0


@dataclass(frozen=True, slots=True)
class Listing:
    """Sentences behind short names. An empty name is a bullet."""

    rows: tuple[tuple[Said, Said], ...]
    indent: int = 0


@dataclass(frozen=True, slots=True)
class PageTable:
    """A table.

    Attributes:
        headers: of the columns, each with a unit after a colon: "s", "B" or "FLOP" of quantities, "n" of other numbers,
            ">" of texts that are right-aligned, "~" of texts that may go on in the next line.
        rows: the cells; a short row has none in the last columns.
        chosen: for each row whether it is the choice among all of them; empty if nothing is chosen.
        names: the column of dotted names, which may be long.
        least: letters of each column at least, so that tables below one another align.
        bare: whether the headers are those of a table above.
        search: an example of what to look for in a long table; empty if it is not long.
        indent: columns on its left, where letters are of one width.
    """

    headers: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    title: str = ""
    chosen: tuple[bool, ...] = ()
    names: int | None = None
    least: tuple[int, ...] = ()
    bare: bool = False
    framed: bool = False
    search: str = ""
    indent: int = 0

    @property
    def columns(self) -> list[tuple[str, str]]:
        """The title and the unit of each column."""
        return [(title, unit) for title, _, unit in (header.partition(":") for header in self.headers)]

    @property
    def cells(self) -> list[list[Said | Fill]]:
        """The rows, with texts for numbers."""
        units = [unit for _, unit in self.columns]
        return [[shown(cell, unit) for cell, unit in zip(row, units, strict=False)] for row in self.rows]

    @property
    def choices(self) -> tuple[bool, ...]:
        """For each row whether it is chosen."""
        return self.chosen or (False,) * len(self.rows)


def shown(cell: Cell, unit: str) -> Said | Fill:
    """Write a number in its unit."""
    if not isinstance(cell, int | float):
        return "-" if cell is None else cell
    if unit == "n":
        return f"{cell:.2f}" if isinstance(cell, float) else str(cell)
    return format_quantity(cell, unit)


@dataclass(frozen=True, slots=True)
class Bar:
    """A named row of values, one of each part; the name of one in a series is a number."""

    name: str | int
    values: tuple[float, ...]
    remarks: tuple[str, ...] = ()
    chosen: bool = False

    @property
    def total(self) -> float:
        return sum(self.values)


@dataclass(frozen=True, slots=True)
class Bars:
    """Quantities beside one another, each made of parts.

    Attributes:
        unit: of all values: "FLOP", "s" or "B".
        parts: the name of each part, and its kind (see `TimelineEvent`) or the number of what it stands for.
        of: what each bar of a series is of, such as "rank"; empty if the bars are alternatives.
    """

    title: str
    unit: str
    parts: tuple[tuple[str, str | int], ...]
    bars: tuple[Bar, ...]
    of: str = ""

    @property
    def mean(self) -> float:
        return sum(bar.total for bar in self.bars) / len(self.bars)

    @property
    def most(self) -> float:
        return max(bar.total for bar in self.bars)

    @property
    def summary(self) -> Paragraph:
        """Say what a series amounts to."""
        mean, most = (format_quantity(value, self.unit) for value in (self.mean, self.most))
        ratio = f"{self.most / self.mean if self.mean else 1:.2f}x the mean"
        return Paragraph((f"mean {mean}; the busiest {self.of} has {most}, ", Words(ratio, "bold")))


@dataclass(frozen=True, slots=True)
class TimelineEvent:
    """Something that takes a stretch of time.

    Attributes:
        begin, end: seconds.
        kind: "compute", "elementwise", "gather", "scatter", "exchange", "wait", "buffers", ...
        names: the things that it deals with; there may be many.
    """

    begin: float
    end: float
    kind: str
    number: int
    title: str = ""
    remarks: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    height: float = 1.0


@dataclass(frozen=True, slots=True)
class Lane:
    """A line of a timeline; lanes `of` one thing are beside one another. One of detail needs much room."""

    of: str
    name: str
    events: tuple[TimelineEvent, ...]
    detail: bool = False


@dataclass(frozen=True, slots=True)
class Timeline:
    """What happens when, from 0 to `seconds`; `numbers` says what the numbers of its events are."""

    title: str
    seconds: float
    lanes: tuple[Lane, ...]
    numbers: str


@dataclass(frozen=True, slots=True)
class Detail:
    """Blocks that are left out where there is little room."""

    body: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class Section:
    """A titled part with a few words on it; left out if its body is empty. A folded one may be shown on demand only."""

    title: str
    body: tuple[Block, ...]
    caption: str = ""
    folded: bool = False


Block = Paragraph | Listing | PageTable | Bars | Timeline | Detail | Section


@dataclass(frozen=True, slots=True)
class Figure:
    """A key figure. A line break in its name stands where there may be one; `about` and those of detail need room."""

    value: Said
    name: str
    about: str = ""
    detail: bool = False


@dataclass(frozen=True, slots=True)
class PageModel:
    """A page.

    Attributes:
        kind: what it is; empty for a page without a headline.
        about: a sentence on all of it, where there is much room.
        remarks: lines below the figures; empty ones are left out.
    """

    body: tuple[Block, ...]
    kind: str = ""
    title: str = ""
    about: str = ""
    figures: tuple[Figure, ...] = ()
    remarks: tuple[str, ...] = ()
    facts: tuple[tuple[str, str], ...] = ()


def note(text: str, style: str = "", indent: int = 0) -> Paragraph:
    """A sentence of one look."""
    return Paragraph((Words(text, style),), indent)


def text_of(said: Said) -> str:
    """What is said, without its look."""
    return said if isinstance(said, str) else said.text


def rows_of(things: Iterable[object], *fields: str) -> tuple[tuple[Any, ...], ...]:
    """A row per thing: the values of at least two of its fields."""
    return tuple(map(attrgetter(*fields), things))
