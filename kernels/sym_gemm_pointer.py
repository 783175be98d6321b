"""sym_gemm by pointers: any strides, any sizes, any architecture."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl
from torch import Tensor

from canzona_compile.kernels.dispatch import Tile, tiles_of_triangle
from canzona_compile.kernels.triangle import INTERPRETED, scalar, tile_corner


@triton.jit
def sym_gemm_pointer(
    a,
    b,
    c,
    d,
    alpha,
    beta,
    diag,
    M,
    K,
    a_batch,
    a_row,
    a_col,
    b_batch,
    b_row,
    b_col,
    c_batch,
    c_row,
    c_col,
    d_batch,
    d_row,
    d_col,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BAND: tl.constexpr,
    HAS_C: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One program computes one tile of ROWS x COLS and writes its part of the lower triangle to both sides.

    One of ROWS and COLS is a multiple of the other one.
    """
    SQUARE: tl.constexpr = ROWS if ROWS > COLS else COLS
    side = tl.cdiv(M, SQUARE)
    tiles = SQUARE // ROWS * (SQUARE // COLS) * (side * (side + 1) // 2)
    pid = tl.program_id(0)
    # Offsets are 64 bits wide: a stack of 320 matrices of 2560 x 3072 is more than 32 bits can count.
    batch = (pid // tiles).to(tl.int64)
    top, left = tile_corner(pid % tiles, side, ROWS, COLS, BAND)
    rows = top + tl.arange(0, ROWS)
    cols = left + tl.arange(0, COLS)
    ks = tl.arange(0, BLOCK_K)

    wide_rows = rows.to(tl.int64)
    wide_cols = cols.to(tl.int64)
    wide_ks = ks.to(tl.int64)
    a_tile = a + batch * a_batch + wide_rows[:, None] * a_row + wide_ks[None, :] * a_col
    b_tile = b + batch * b_batch + wide_cols[None, :] * b_row + wide_ks[:, None] * b_col
    acc = tl.zeros((ROWS, COLS), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        rest = K - k
        x = tl.load(a_tile, mask=(rows[:, None] < M) & (ks[None, :] < rest), other=0.0)
        y = tl.load(b_tile, mask=(cols[None, :] < M) & (ks[:, None] < rest), other=0.0)
        if UPCAST:
            x = x.to(tl.float32)
            y = y.to(tl.float32)
        acc = tl.dot(x, y, acc, input_precision="ieee")
        a_tile += BLOCK_K * a_col
        b_tile += BLOCK_K * b_col

    inside = (rows[:, None] < M) & (cols[None, :] < M)
    result = acc * scalar(alpha)
    here = batch * d_batch + wide_rows[:, None] * d_row + wide_cols[None, :] * d_col
    added = batch * c_batch + wide_rows[:, None] * c_row + wide_cols[None, :] * c_col
    if top >= left + COLS:  # all of it lies below the diagonal
        if HAS_C:
            result += scalar(beta) * tl.load(c + added, mask=inside, other=0.0).to(tl.float32)
        value = result.to(d.dtype.element_ty)
        tl.store(d + here, value, mask=inside)
        there = batch * d_batch + wide_cols[:, None] * d_row + wide_rows[None, :] * d_col
        tl.store(d + there, tl.trans(value), mask=(cols[:, None] < M) & (rows[None, :] < M))
    else:
        # What lies above the diagonal becomes the mirror image of what lies below, bit for bit. Each element is written
        # once, by one program, and if d is c, then no other program reads it.
        own = inside
        if ROWS != COLS:
            own = inside & (rows[:, None] >= cols[None, :])
        if HAS_C:
            result += scalar(beta) * tl.load(c + added, mask=own, other=0.0).to(tl.float32)
        result = tl.where(rows[:, None] == cols[None, :], result + scalar(diag), result)
        value = result.to(d.dtype.element_ty)
        if ROWS == COLS:
            value = tl.where(rows[:, None] >= cols[None, :], value, tl.trans(value))
        tl.store(d + here, value, mask=own)
        if ROWS != COLS:
            across = batch * d_batch + wide_cols[None, :] * d_row + wide_rows[:, None] * d_col
            tl.store(d + across, value, mask=inside & (rows[:, None] > cols[None, :]))


def launch(tile: Tile, a: Tensor, b: Tensor, c: Tensor | None, d: Tensor, scalars: tuple[object, ...]) -> None:
    """Run the kernel. a, b: [B, M, K]; c, d: [B, M, M]; scalars: alpha, beta and diag, floats or 0-d tensors."""
    if max(tile.m, tile.n) % min(tile.m, tile.n):
        raise ValueError(f"one side of a tile must be a multiple of the other, which is not so for {tile.m} x {tile.n}")
    batch, m, k = a.shape
    c_or_a = d if c is None else c
    sym_gemm_pointer[(batch * tiles_of_triangle(m, tile),)](
        a,
        b,
        c_or_a,
        d,
        *scalars,
        m,
        k,
        *a.stride(),
        *b.stride(),
        *c_or_a.stride(),
        *d.stride(),
        ROWS=tile.m,
        COLS=tile.n,
        BLOCK_K=tile.k,
        BAND=tile.band,
        HAS_C=c is not None,
        UPCAST=INTERPRETED,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
