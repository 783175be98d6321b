"""The walk over the tiles of a triangle: each tile once, whatever its shape."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
import triton
import triton.language as tl

from canzona_compile.kernels.dispatch import Tile, tiles_of_triangle, triangle
from canzona_compile.kernels.triton_parts import tile_corner, triangle_row, triangle_tile
from tests.harness.marks import crossed
from tests.kernels.kernel_cases import interpreted

pytestmark = interpreted


@triton.jit
def tiles_of(i, j, side, SIZE: tl.constexpr, BAND: tl.constexpr):
    n = tl.arange(0, SIZE)
    row, column = triangle_tile(tl.minimum(n, side * (side + 1) // 2 - 1), side, BAND)
    tl.store(i + n, row)
    tl.store(j + n, column)


@triton.jit
def rows_of(n, row, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(row + at, triangle_row(tl.load(n + at)))


@pytest.mark.parametrize("band", [1, 2, 8])
@pytest.mark.parametrize("side", [1, 2, 7, 8, 9, 31, 44])
def test_each_tile_of_the_triangle_once(side: int, band: int) -> None:
    i, j = torch.zeros(1024, dtype=torch.int32), torch.zeros(1024, dtype=torch.int32)
    tiles_of[(1,)](i, j, side, SIZE=1024, BAND=band)
    seen = list(zip(i.tolist(), j.tolist(), strict=True))[: triangle(side)]
    assert sorted(seen) == [(row, column) for row in range(side) for column in range(row + 1)]


@triton.jit
def corners_of(top, left, side, tiles, SIZE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, BAND: tl.constexpr):
    n = tl.arange(0, SIZE)
    row, column = tile_corner(tl.minimum(n, tiles - 1), side, ROWS, COLS, BAND)
    tl.store(top + n, row)
    tl.store(left + n, column)


@pytest.mark.parametrize(
    ("shape", "side", "band"), crossed([(16, 16), (16, 32), (64, 16), (8, 32)], [1, 2, 7, 11], [1, 2, 8]), ids=str
)
def test_tiles_of_any_shape_cover_the_triangle_once(shape: tuple[int, int], side: int, band: int) -> None:
    """No two of them share an element, none lies above the diagonal, and none of the lower triangle is left out."""
    rows, columns = shape
    size = side * max(shape)
    count = tiles_of_triangle(size, Tile(rows, columns, 16, warps=4, stages=2))
    top, left = torch.zeros(1024, dtype=torch.int32), torch.zeros(1024, dtype=torch.int32)
    corners_of[(1,)](top, left, side, count, SIZE=1024, ROWS=rows, COLS=columns, BAND=band)
    covered = torch.zeros(size, size, dtype=torch.int32)
    for i, j in zip(top[:count].tolist(), left[:count].tolist(), strict=True):
        assert i + rows > j, "nothing of it is in the triangle"
        covered[i : i + rows, j : j + columns] += 1
    assert (covered <= 1).all()
    assert (covered.tril() == torch.ones(size, size, dtype=torch.int32).tril()).all()


def test_rows_are_right_where_square_roots_are_rounded() -> None:
    """At both ends of rows; rows of 8191 tiles of 128 are matrices of a million rows."""
    rows = torch.arange(1, 8192)
    ends = torch.cat([rows * (rows + 1) // 2 - 1, rows * (rows + 1) // 2]).to(torch.int32)
    ends = torch.cat([ends, ends.new_zeros(2)])
    found = torch.zeros_like(ends)
    rows_of[(1,)](ends, found, SIZE=ends.numel())
    assert torch.equal(found[:-2], torch.cat([rows - 1, rows]).to(torch.int32))
