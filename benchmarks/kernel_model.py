"""Writes docs/kernel_model.md: what data sheets and the compiler's figures allow each candidate, by a simple model.

    python benchmarks/kernel_model.py > docs/kernel_model.md

It reads tables of what each candidate takes of a multiprocessor, which `kernels_ahead.py` made of compiled kernels, so
nothing is compiled. Nothing here is measured.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from canzona_compile.kernels.dispatch import MULTIPROCESSORS, Tile, tiles_of_triangle

ROOT = Path(__file__).parents[1]
TABLES = ROOT / "tests" / "golden" / "kernels"
WIDTH = 2  # bytes of bfloat16

# -- what a multiprocessor has: CUDA C++ Programming Guide, and the toolkit's occupancy calculator ----


@dataclass(frozen=True, slots=True)
class ProcessorLimits:
    """What a multiprocessor has.

    Attributes:
        shared: bytes of shared memory for all programs.
        shared_program: bytes that one program may have.
        columns: of tensor memory; 0 where there is none.
        warps, programs: the most that may be there at once.
    """

    shared: int
    shared_program: int
    columns: int
    warps: int = 64
    programs: int = 32


LIMITS = {
    80: ProcessorLimits(164 << 10, 163 << 10, 0),
    90: ProcessorLimits(228 << 10, 227 << 10, 0),
    100: ProcessorLimits(228 << 10, 227 << 10, 512),
}
REGISTERS = 65536  # of a multiprocessor, a quarter for each of its four parts
PARTS = 4
REGISTER_UNIT = 256  # registers are handed out to a warp in these
SHARED_UNIT = 128
RESERVED = 1024  # bytes of shared memory that the system takes for every program


@dataclass(frozen=True, slots=True)
class Occupancy:
    """How many programs fit, and what keeps more from it: registers, shared memory, tensor memory or warps."""

    programs: int
    limit: str


def occupancy(arch: int, registers: int, threads: int, shared: int, columns: int = 0) -> Occupancy:
    """Count the programs that fit on a multiprocessor.

    Args:
        arch: ten times the compute capability's major number plus the minor one.
        registers: of a thread.
        threads: of a program, a multiple of 32.
        shared: bytes of shared memory of a program.
        columns: of tensor memory of a program.
    """
    limits, warps = LIMITS[arch], threads // 32
    of_warp = rounded(registers * 32, REGISTER_UNIT)
    fits = {
        "registers": REGISTERS // PARTS // of_warp * PARTS // warps,
        "shared memory": limits.shared // rounded(shared + RESERVED, SHARED_UNIT),
        "warps": min(limits.warps // warps, limits.programs),
    }
    if columns:
        fits["tensor memory"] = limits.columns // columns
    limit = min(fits, key=lambda name: fits[name])
    return Occupancy(fits[limit], limit)


def rounded(amount: int, unit: int) -> int:
    """The next multiple of a unit."""
    return -(-amount // unit) * unit


# -- the table of what every candidate takes of it --------------------------------------------------

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
        operands: "as they lie", or "turned" for transposed ones.
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
    """One line of the table, of what kernels_ahead.py printed."""
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


def resources_of(arch: int, triton: str, rows: Sequence[Mapping[str, Any]]) -> str:
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


# -- the model ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DataSheet:
    """What the maker says of a GPU.

    Attributes:
        arch: ten times the compute capability's major number plus the minor one.
        flops: dense bfloat16 products, FLOP/s, without sparsity.
        bandwidth: of its memory, B/s.
        per_clock: FLOP of a multiprocessor in a clock, from the architecture's white paper.
    """

    name: str
    arch: int
    flops: float
    bandwidth: float
    per_clock: int


SHEETS = (
    DataSheet("A100 SXM 80 GB", 80, 312e12, 2.039e12, 2048),
    DataSheet("H100 SXM", 90, 989e12, 3.35e12, 4096),
    DataSheet("H200 SXM", 90, 989e12, 4.8e12, 4096),
    DataSheet("B200", 100, 2250e12, 8.0e12, 8192),
)
SHARED = 128  # bytes that shared memory moves in a clock: 32 banks of 4 (CUDA C++ Programming Guide)
SHAPES = ((1, 2048, 8192), (1, 4096, 4096), (1, 4096, 12288), (1, 5120, 25600), (16, 1024, 4096), (64, 1024, 1024))

TEXT = """# What the matrix kernels can reach at most: a model

**This page is a model, not a measurement**: no kernel ran for it. It says what no tuning can exceed. To measure, run
`python -m canzona_compile tune` and `benchmarks/gpu.py`.

A column is a product of batch x m x k. A cell has our best kernel by the model: its time in us, the library's time
divided by it in brackets (below 1, our kernel can hardly win), and its tile.

| part of a launch | the model |
|---|---|
| memory | each operand is read once and the result written once, at the data sheet's bandwidth |
| products | the tiles of the busiest multiprocessor, at the data sheet's rate or, if small, that of shared memory |
| ends of a tile | reading the first operands and writing the result; hidden by a second program on the multiprocessor |
| the library | tiles of 128 x 256, all ends hidden, no bound by shared memory |
| not in the model | clocks under load (an H200 sustains 790 of 989 TFLOP/s), caches, latencies, the cost of a launch |

Memory, and products with their ends, overlap: the larger one counts.
"""
END = """`python benchmarks/kernel_model.py > docs/kernel_model.md` writes this page; `--all` prints every candidate
of the tuner. Sources: data sheets, and the registers and shared memory that the compiler gave each kernel
(`tests/golden/kernels/resources-sm_*.txt`).
"""


def tiles(row: ResourceRow, shape: tuple[int, int, int]) -> int:
    """How many tiles a launch has: sym_gemm of batch x m x k, gemm_axpby of batch x m x m with m x k."""
    batch, m, k = shape
    rows, columns, _ = row.tile
    if row.operation == "sym_gemm":
        return batch * tiles_of_triangle(m, Tile(*row.tile, row.warps, row.stages))
    return batch * -(-m // rows) * -(-k // columns)


def traffic(operation: str, shape: tuple[int, int, int]) -> int:
    """Bytes that have to be read and written at least."""
    batch, m, k = shape
    elements = m * k + m * m if operation == "sym_gemm" else m * m + 2 * m * k
    return batch * elements * WIDTH


def seconds(row: ResourceRow, shape: tuple[int, int, int], sheet: DataSheet) -> float:
    """The model's time of a launch."""
    processors = MULTIPROCESSORS[sheet.arch]
    rows, columns, step = row.tile
    summed = shape[2] if row.operation == "sym_gemm" else shape[1]
    busiest = -(-tiles(row, shape) // processors)
    rate = sheet.flops / processors
    moved = 2 * (rows + columns) * summed * WIDTH / SHARED * sheet.per_clock
    one = max(2 * rows * columns * summed, moved) / rate
    ends = ((rows + columns) * step + 2 * rows * columns) * WIDTH / (sheet.bandwidth / processors)
    exposed = ends if row.programs > 1 else busiest * ends
    return max(busiest * one + exposed, traffic(row.operation, shape) / sheet.bandwidth)


def of_library(operation: str, shape: tuple[int, int, int], sheet: DataSheet) -> float:
    """A bound for a library: the whole product, in tiles of 128 x 256 that nothing else holds up."""
    batch, m, k = shape
    processors = MULTIPROCESSORS[sheet.arch]
    columns, summed = (m, k) if operation == "sym_gemm" else (k, m)
    busiest = -(-batch * -(-m // 128) * -(-columns // 256) // processors)
    one = 2 * 128 * 256 * summed / (sheet.flops / processors)
    return max(busiest * one, traffic(operation, shape) / sheet.bandwidth)


def rows_of(arch: int) -> list[ResourceRow]:
    """The table of an architecture, for operands as they lie."""
    text = (TABLES / f"resources-sm_{arch}.txt").read_text(encoding="utf-8")
    return [row for row in parsed(text) if row.operands == "as they lie"]


def named(row: ResourceRow) -> str:
    """A kernel in a few characters."""
    return f"{row.kernel} {'x'.join(map(str, row.tile))} w{row.warps} s{row.stages}"


def table(sheet: DataSheet, operation: str, rows: Iterable[ResourceRow]) -> Iterator[str]:
    """A table of Markdown: a line per candidate, microseconds and the bound's ratio to the library's per shape."""
    yield f"| {operation} on {sheet.name} | programs | " + " | ".join("x".join(map(str, s)) for s in SHAPES) + " |"
    yield "|---|---|" + "---|" * len(SHAPES)
    bounds = [of_library(operation, shape, sheet) for shape in SHAPES]
    yield "| library, bound in us | | " + " | ".join(f"{1e6 * bound:.0f}" for bound in bounds) + " |"
    for row in rows:
        times = [seconds(row, shape, sheet) for shape in SHAPES]
        cells = [f"{1e6 * t:.0f} ({bound / t:.2f})" for t, bound in zip(times, bounds, strict=True)]
        yield f"| {named(row)} | {row.programs} | " + " | ".join(cells) + " |"


def best(sheet: DataSheet, operation: str) -> str:
    """A row of Markdown: the fastest candidate by the model, for each shape."""
    own = [row for row in rows_of(sheet.arch) if row.operation == operation]
    cells = []
    for shape in SHAPES:
        first = min(own, key=lambda row: seconds(row, shape, sheet))
        time, bound = seconds(first, shape, sheet), of_library(operation, shape, sheet)
        cells.append(f"{1e6 * time:.0f} ({bound / time:.2f}) {'x'.join(map(str, first.tile[:2]))}")
    return f"| {sheet.name} | " + " | ".join(cells) + " |"


def page() -> str:
    """The whole of docs/kernel_model.md."""
    parts = [TEXT]
    heading = " | ".join("x".join(map(str, shape)) for shape in SHAPES)
    for operation, what in (("sym_gemm", "X @ X.T by halves"), ("gemm_axpby", "a X + B @ X")):
        parts.append(f"## {operation}: {what}\n")
        rows = [f"| us (library / ours) tile | {heading} |", "|---|" + "---|" * len(SHAPES)]
        parts.append("\n".join([*rows, *(best(sheet, operation) for sheet in SHEETS)]) + "\n")
    sheets = ", ".join(f"{s.name} {s.flops / 1e12:.0f} TFLOP/s and {s.bandwidth / 1e12:g} TB/s" for s in SHEETS)
    return "\n".join([*parts, textwrap.fill(f"Data sheets: {sheets}.", 116) + "\n", END])


def candidates() -> str:
    """Tables of every candidate."""
    parts = []
    for sheet in SHEETS:
        for operation in ("sym_gemm", "gemm_axpby"):
            own = [row for row in rows_of(sheet.arch) if row.operation == operation]
            parts.append("\n".join(table(sheet, operation, own)) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    print(candidates() if "--all" in sys.argv else page(), end="")
