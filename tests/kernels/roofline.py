"""Writes docs/kernel_model.md: what data sheets and the compiler's figures allow each candidate, by a simple model.

    python -m tests.kernels.roofline > docs/kernel_model.md

It reads the tables in tests/golden/kernels/, so nothing is compiled. Nothing here is measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from canzona_compile.kernels.dispatch import MULTIPROCESSORS, Tile, tiles_of_triangle
from tests.kernels.resources import ResourceRow, parsed

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "kernels"
WIDTH = 2  # bytes of bfloat16


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

**This page is a model, not a measurement**: no kernel ran for it. It says which candidates the tuner should try, and
what no tuning can give. To measure, run `python -m canzona_compile tune` and `benchmarks/gpu.py`.

A column is a product of batch x m x k. A row is a kernel with its tile, warps (`w`) and stages (`s`); *programs* is how
many of them fit on a multiprocessor. A cell is the time of a launch in us, with the library's bound divided by it in
brackets: below 1 a kernel can hardly win. A launch takes the larger of two times:

* *memory*: every operand is read once and the result written once, at the data sheet's bandwidth;
* *products and ends*: the tiles of the busiest multiprocessor, so an unfinished wave counts as a whole one. A tile
  computes at the data sheet's rate, or, if small, at the rate at which shared memory takes in its operands and gives
  them out once. Its ends, reading the first operands and writing the result, use the multiprocessor's share of the
  bandwidth. Two programs on a multiprocessor hide each other's ends, and a persistent program hides those of all its
  tiles but one; otherwise every tile adds them.

The library's bound is for the whole product in tiles of 128 x 256, with all ends hidden and no bound by shared memory.
Not in the model: clocks under load (an H200 sustains some 790 of its 989 TFLOP/s), bandwidth of caches, latencies of
instructions, the cost of a launch.

`python -m tests.kernels.roofline` writes this page from data sheets, the sizes of the products, and the registers and
shared memory that the compiler gave each kernel (`tests/golden/kernels/resources-sm_*.txt`).
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
    hidden = row.programs > 1 or row.kernel.startswith("persistent")
    exposed = ends if hidden else busiest * ends
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
    text = (GOLDEN / f"resources-sm_{arch}.txt").read_text(encoding="utf-8")
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


def page() -> str:
    """The whole of docs/kernel_model.md."""
    parts = [TEXT]
    for sheet in SHEETS:
        parts.append(f"## {sheet.name}\n")
        rate, bandwidth = sheet.flops / 1e12, sheet.bandwidth / 1e12
        parts.append(f"{rate:.0f} TFLOP/s, {bandwidth:g} TB/s, {MULTIPROCESSORS[sheet.arch]} multiprocessors.\n")
        for operation in ("sym_gemm", "gemm_axpby"):
            own = [row for row in rows_of(sheet.arch) if row.operation == operation]
            parts.append("\n".join(table(sheet, operation, own)) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    print(page(), end="")
