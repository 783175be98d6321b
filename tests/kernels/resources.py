"""The table of what every candidate takes of a multiprocessor: text that is kept in tests/golden/kernels/."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.kernels.occupancy import occupancy

COLUMNS = (
    "operation",
    "kernel",
    "tile",
    "warps",
    "stages",
    "operands",
    "registers",
    "threads",
    "shared",
    "columns",
    "programs",
    "limit",
)


@dataclass(frozen=True, slots=True)
class ResourceRow:
    """A line of the table, as it is read back.

    Attributes:
        tile: rows and columns of a tile, and how much of the sum is loaded at a time.
        operands: "as they lie", or "turned" for transposed ones with scalars in memory.
        programs: how many of them fit on a multiprocessor.
    """

    operation: str
    kernel: str
    tile: tuple[int, int, int]
    warps: int
    stages: int
    operands: str
    programs: int


def cells(built: Mapping[str, Any]) -> tuple[str, ...]:
    """One line of the table, of what ahead.py printed."""
    tile = built["tile"]
    roles = " roles" if tile["specialized"] else ""
    fits = occupancy(built["arch"], built["registers"], built["threads"], built["shared"], built["columns"])
    return (
        built["op"],
        built["kernel"],
        f"{tile['m']}x{tile['n']}x{tile['k']}",
        f"{tile['warps']}{roles}",
        str(tile["stages"]),
        built["variant"] or "as they lie",
        str(built["registers"]),
        str(built["threads"]),
        str(built["shared"]),
        str(built["columns"]),
        str(fits.programs),
        fits.limit,
    )


def heading(arch: int, triton: str) -> str:
    """The first lines of the table, which say what it holds for."""
    return (
        f"# Triton {triton}, sm_{arch}: registers of a thread, threads, bytes of shared memory and columns of tensor\n"
        "# memory of a program; how many programs fit on a multiprocessor, and what keeps more from it.\n"
    )


def table(arch: int, triton: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """The whole text."""
    return heading(arch, triton) + "".join(lines([COLUMNS, *map(cells, rows)]))


def lines(rows: Iterable[Sequence[str]]) -> list[str]:
    """Rows of cells as lines, with bars between them; widths are fixed, so that a line depends on nothing else."""
    widths = (10, 10, 10, 7, 6, 11, 9, 7, 7, 7, 8, 13)
    return [" | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() + "\n" for row in rows]


def parsed(text: str) -> list[ResourceRow]:
    """The rows of a table."""
    found = []
    for line in text.splitlines():
        cell = [part.strip() for part in line.split("|")]
        if line.startswith("#") or cell[0] == COLUMNS[0]:
            continue
        m, n, k = map(int, cell[2].split("x"))
        warps, *roles = cell[3].split()
        kernel = " ".join([cell[1], *roles])
        programs = int(cell[COLUMNS.index("programs")])
        found.append(ResourceRow(cell[0], kernel, (m, n, k), int(warps), int(cell[4]), cell[5], programs))
    return found
