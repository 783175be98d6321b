"""The result: a row per parameter, and the table of them."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.jupyter import JupyterMixin
from rich.table import Table
from rich.text import Text
from torch import nn

from canzona_compile.ir.layout import Shape

STYLES = {"matrix": "green", "other": "cyan", "frozen": "dim"}
TOTALS = {"matrix": "matrices", "other": "others", "frozen": "frozen"}
UNITS = ((1e9, "G"), (1e6, "M"), (1e3, "k"))
NamedParams = list[tuple[str, nn.Parameter]]


@dataclass(frozen=True, slots=True)
class Row:
    """One parameter.

    Attributes:
        name: its name, without what DDP, torch.compile and activation checkpointing put into it.
        shape: of the whole parameter, also where a rank holds a fragment.
        kind: "matrix", "other", or "frozen" if it is not trained.
        why: the reason.
    """

    name: str
    shape: Shape
    kind: str
    why: str

    @property
    def elements(self) -> int:
        """The number of elements of the whole parameter."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, repr=False)
class Choice(JupyterMixin):
    """Which parameters are hidden matrices, and why; print it: equal parameters of repeated layers share a line.

    Attributes:
        rows: one entry per parameter, in the order of `model.named_parameters()`.
        matrices: the hidden matrices with their names, as torch.optim.Muon takes them.
        others: all other trained parameters with their names, as torch.optim.AdamW takes them.
    """

    rows: tuple[Row, ...]
    matrices: NamedParams = field(compare=False)
    others: NamedParams = field(compare=False)

    def to_dict(self) -> dict[str, Any]:
        """The rows as dicts, lists and plain values."""
        return {"rows": [asdict(row) for row in self.rows]}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = Table(title="hidden matrices and other parameters", title_justify="left")
        for column in ("parameter", "", "shape", "elements", "kind", "why"):
            table.add_column(column, overflow="fold", justify="right" if column in ("", "elements") else "left")
        for rows in alike(self.rows):
            one, elements = rows[0], format_count(sum(row.elements for row in rows))
            shape = "x".join(map(str, one.shape)) or "scalar"
            repeats, kind = f"x {len(rows)}" if len(rows) > 1 else "", Text(one.kind, STYLES[one.kind])
            table.add_row(Text(shared_name(rows)), repeats, shape, elements, kind, Text(one.why))
        yield table
        yield Text("\n".join(totals(self.rows)))

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), width=120, color_system=None)
        console.print(self)
        assert isinstance(console.file, io.StringIO)
        return console.file.getvalue()

    __repr__ = __str__


def alike(rows: Sequence[Row]) -> list[list[Row]]:
    """Group parameters that differ only in the numbers in their names."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        name = tuple("*" if part.isdigit() else part for part in row.name.split("."))
        groups.setdefault((name, row.shape, row.kind, row.why), []).append(row)
    return list(groups.values())


def shared_name(rows: Sequence[Row]) -> str:
    """Name a group of parameters: "layers.*.q_proj.weight"."""
    parts = zip(*(row.name.split(".") for row in rows), strict=True)
    return ".".join(own[0] if len(set(own)) == 1 else "*" for own in parts)


def totals(rows: Sequence[Row]) -> Iterator[str]:
    """Count parameters and elements of each kind: "matrices: 196 parameters, 440 M elements"."""
    for kind, word in TOTALS.items():
        own = [row.elements for row in rows if row.kind == kind]
        if own or kind != "frozen":
            yield f"{word}: {len(own)} parameter{'s' * (len(own) != 1)}, {format_count(sum(own))} elements"


def format_count(count: int) -> str:
    """Format a count with a decimal prefix: "440.4 M"."""
    size, prefix = next((unit for unit in UNITS if count >= unit[0]), (1, ""))
    return f"{count / size:.4g} {prefix}".rstrip()
