"""The result: a row per parameter, and the table of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import nn

from canzona_compile.ir.layout import Shape
from canzona_compile.report.page import PageModel, PageTable, Words, note
from canzona_compile.report.printable import Printable
from canzona_compile.report.units import format_count, format_shape, plural

STYLES = {"matrix": "green", "other": "cyan", "frozen": "dim"}
TOTALS = {"matrix": "matrices", "other": "others", "frozen": "frozen"}
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
class Choice(Printable):
    """The parameters that are hidden matrices, the others, and why. Printed, repeated layers share a line.

    Attributes:
        rows: one entry per parameter, in the order of `model.named_parameters()`.
        matrices: the hidden matrices with their names, as torch.optim.Muon takes them.
        others: all other trained parameters with their names, as torch.optim.AdamW takes them.
    """

    text_width = 120

    rows: tuple[Row, ...]
    matrices: NamedParams = field(compare=False)
    others: NamedParams = field(compare=False)

    def to_dict(self) -> dict[str, Any]:
        """The rows as dicts, lists and plain values."""
        return {"rows": [asdict(row) for row in self.rows]}

    def page(self) -> PageModel:
        rows = []
        for own in alike(self.rows):
            one, elements = own[0], format_count(sum(row.elements for row in own))
            repeats = f"x {len(own)}" if len(own) > 1 else ""
            look = Words(one.kind, STYLES[one.kind])
            rows.append((shared_name(own), repeats, format_shape(one.shape), elements, look, one.why))
        headers, title = (
            ("parameter", ":>", "shape", "elements:>", "kind", "why"),
            "hidden matrices and other parameters",
        )
        return PageModel((PageTable(headers, tuple(rows), title, framed=True), *map(note, totals(self.rows))))

    __repr__ = Printable.__str__


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
            yield f"{word}: {plural(len(own), 'parameter')}, {format_count(sum(own))} elements"
