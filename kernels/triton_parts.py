"""What the Triton kernels share: the tiles of a lower triangle, stacks as tensor descriptors (TMA)."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

# Triton decides this when it decorates a kernel. Its interpreter multiplies the bit patterns of bfloat16 operands, so
# kernels cast them up in the interpreter, and only there.
INTERPRETED = bool(triton.knobs.runtime.interpret)


@triton.jit
def triangle_row(n):
    """Return the row of the n-th entry of a lower triangle, counted row by row."""
    row = ((tl.sqrt((8 * n + 1).to(tl.float32)) - 1.0) * 0.5).to(tl.int32)
    # A rounded square root may be one off, in either direction.
    row = tl.where(row * (row + 1) // 2 > n, row - 1, row)
    row = tl.where((row + 1) * (row + 2) // 2 <= n, row + 1, row)
    return row


@triton.jit
def triangle_tile(n, side, BAND: tl.constexpr):
    """Return row and column of the n-th tile of a lower triangle of side x side tiles.

    Programs walk BAND rows together, column by column, so that programs that run at the same time read the same rows
    and columns. There are as many tiles above a band as in a walk row by row, which gives the band.
    """
    top = triangle_row(n) // BAND * BAND
    height = tl.minimum(side - top, BAND)
    inside = n - top * (top + 1) // 2
    corner = inside - top * height  # the band is a rectangle, then a triangle at the diagonal
    row = triangle_row(tl.maximum(corner, 0))
    i = top + tl.where(corner < 0, inside % height, row)
    j = tl.where(corner < 0, inside // height, top + corner - row * (row + 1) // 2)
    return i, j


@triton.jit
def tile_corner(n, side, ROWS: tl.constexpr, COLS: tl.constexpr, BAND: tl.constexpr):
    """Return the first row and the first column of the n-th tile of ROWS x COLS of a lower triangle.

    The triangle is made of side x side squares, as large as the longer side of a tile. The tiles of a square follow
    one another, row by row, so a triangle has as many tiles for each of its squares. Tiles of the squares on the
    diagonal reach above it; the caller leaves out what lies there.
    """
    SQUARE: tl.constexpr = ROWS if ROWS > COLS else COLS
    ACROSS: tl.constexpr = SQUARE // COLS
    PARTS: tl.constexpr = SQUARE // ROWS * ACROSS
    i, j = triangle_tile(n // PARTS, side, BAND)
    part = n % PARTS
    return i * SQUARE + part // ACROSS * ROWS, j * SQUARE + part % ACROSS * COLS


# -- descriptors of [batch, rows, columns], with the contiguous dim last -----------------------------


def turned(x: Tensor) -> bool:
    """Tell whether the rows of [batch, rows, columns], not its columns, are the contiguous dim."""
    return x.stride(2) != 1


def step(x: Tensor) -> int:
    """Return by how many matrices a descriptor goes on: 0 if all matrices are the same one, which it describes once."""
    return int(x.stride(0) != 0 and x.shape[0] > 1)


def descriptor(x: Tensor, block: tuple[int, int]) -> TensorDescriptor:
    """Describe blocks of a matrix of [batch, rows, columns]; if x is `turned`, all is transposed, `block` too.

    Elements outside of the matrix read as zeros and are not written. Rows have to begin at multiples of 16 bytes.
    """
    if turned(x):
        x, block = x.mT, (block[1], block[0])
    _, rows, columns = x.shape
    batch = x.shape[0] if step(x) else 1
    between = x.stride(0) if batch > 1 else rows * x.stride(1)
    return TensorDescriptor(x, [batch, rows, columns], [between, x.stride(1), 1], [1, *block])
