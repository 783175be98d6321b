"""Renders a page as one HTML file, which opens from disk and loads nothing: the template `page.html` filled in.

The file holds texts only escaped or as JSON. A policy in it allows the scripts that it contains, by their hashes, and
forbids to load anything. This needs the extra "page", so it is imported only when a user asks for a file.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

import jinja2
from markupsafe import Markup, escape
from plotly.offline import get_plotlyjs

from canzona_compile.report.html_charts import Lists, figures_of
from canzona_compile.report.page import Bars, Block, Detail, Fill, PageModel, PageTable, Section, Timeline, text_of


def html(page: PageModel) -> str:
    """Write the whole file; store it in UTF-8."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.lstrip_blocks = True
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    environment.filters |= {"opened": opened, "formula": formula, "kind": lambda block: type(block).__name__}
    environment.tests["section"] = lambda block: isinstance(block, Section)
    environment.globals |= {"digest": digest, "plotly": get_plotlyjs()}
    template = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    text = environment.from_string(template).render(page=page, scripted=Scripted())
    return text.encode("utf-8", "xmlcharrefreplace").decode()  # half of a surrogate pair is not a character


@dataclass(slots=True)
class Scripted:
    """What the script of a page shows. The template adds to it while it is filled in.

    Attributes:
        figures: by the id of the element that shows it.
        tables: long ones, see `coded`.
        lists: the lists of names that a click shows.
    """

    figures: dict[str, Any] = field(default_factory=dict)
    tables: list[Any] = field(default_factory=list)
    lists: Lists = field(default_factory=dict)

    def draw(self, chart: Bars | Timeline) -> list[str]:
        """Draw a chart, and return the ids of its figures."""
        kind = type(chart).__name__.lower()
        begin = sum(name.startswith(kind) for name in self.figures)
        found = {f"{kind}-{i}": own.to_plotly_json() for i, own in enumerate(figures_of(chart, self.lists), begin)}
        self.figures |= found
        return list(found)

    def enter(self, table: PageTable) -> int:
        """Enter a table, and return its place."""
        self.tables.append(coded(table))
        return len(self.tables) - 1

    @property
    def data(self) -> dict[str, Any]:
        return {"figures": self.figures, "lists": list(self.lists), "tables": self.tables}


def coded(table: PageTable) -> dict[str, Any]:
    """Write a table as the different texts of each column, and rows of their places."""
    columns: list[dict[str, int]] = [{} for _ in table.headers]
    rows = []
    for row in table.cells:
        texts = ["" if isinstance(cell, Fill) else text_of(cell) for cell in row]
        rows.append([found.setdefault(text, len(found)) for text, found in zip(texts, columns, strict=True)])
    return {"texts": [list(found) for found in columns], "rows": rows}


def opened(body: Iterable[Block]) -> list[Block]:
    """The blocks of a body, those of its details among them, without empty sections."""
    found: list[Block] = []
    for block in body:
        if isinstance(block, Detail):
            found += opened(block.body)
        elif not isinstance(block, Section) or opened(block.body):
            found.append(block)
    return found


def formula(text: str) -> Markup:
    """Typeset "10 m^3 + 2 m n"."""
    return Markup(re.sub(r"\^(\w+|\([^()]*\))", r"<sup>\1</sup>", str(escape(text))))


def digest(script: str) -> str:
    """Return the name by which a content security policy allows this script."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
