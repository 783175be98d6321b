"""sym_gemm in Triton: by pointers, for any strides and sizes; by tensor descriptors (TMA), for sm_90 and later."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl
from torch import Tensor

from canzona_compile.kernels.dispatch import Tile, tiles_of_triangle
from canzona_compile.kernels.triton_parts import INTERPRETED, descriptor, step, tile_corner, turned


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
    result = acc * alpha
    here = batch * d_batch + wide_rows[:, None] * d_row + wide_cols[None, :] * d_col
    added = batch * c_batch + wide_rows[:, None] * c_row + wide_cols[None, :] * c_col
    if top >= left + COLS:  # all of it lies below the diagonal
        if HAS_C:
            result += beta * tl.load(c + added, mask=inside, other=0.0).to(tl.float32)
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
            result += beta * tl.load(c + added, mask=own, other=0.0).to(tl.float32)
        result = tl.where(rows[:, None] == cols[None, :], result + diag, result)
        value = result.to(d.dtype.element_ty)
        if ROWS == COLS:
            value = tl.where(rows[:, None] >= cols[None, :], value, tl.trans(value))
        tl.store(d + here, value, mask=own)
        if ROWS != COLS:
            across = batch * d_batch + wide_cols[None, :] * d_row + wide_rows[:, None] * d_col
            tl.store(d + across, value, mask=inside & (rows[:, None] > cols[None, :]))


def launch_pointer(tile: Tile, a: Tensor, b: Tensor, c: Tensor | None, d: Tensor, scalars: tuple[float, ...]) -> None:
    """Run the kernel. a, b: [B, M, K]; c, d: [B, M, M]; scalars: alpha, beta and diag."""
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


# -- by tensor descriptors ------------------------------------------------------------------------


@triton.jit
def _finish(
    acc,
    c,
    d,
    alpha,
    beta,
    diag,
    batch,
    c_step,
    top,
    left,
    BLOCK: tl.constexpr,
    HAS_C: tl.constexpr,
):
    """Scale one square block, add to it, and write it to both sides of the diagonal, on the diagonal once."""
    # Another program computes the block above the diagonal, as its mirror image below.
    if top >= left:
        result = acc * alpha
        if HAS_C:
            add = c.load([batch * c_step, top, left]).reshape(BLOCK, BLOCK)
            result += beta * add.to(tl.float32)
        if top != left:
            value = result.to(d.dtype)
            d.store([batch, top, left], value.reshape(1, BLOCK, BLOCK))
            d.store([batch, left, top], tl.trans(value).reshape(1, BLOCK, BLOCK))
        else:
            rows = tl.arange(0, BLOCK)[:, None]
            cols = tl.arange(0, BLOCK)[None, :]
            value = tl.where(rows == cols, result + diag, result).to(d.dtype)
            # Both halves of a block of the diagonal become the same bits.
            value = tl.where(rows >= cols, value, tl.trans(value))
            d.store([batch, top, left], value.reshape(1, BLOCK, BLOCK))


@triton.jit
def sym_gemm_tma(
    a,
    b,
    c,
    d,
    alpha,
    beta,
    diag,
    M,
    K,
    a_step,
    b_step,
    c_step,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BAND: tl.constexpr,
    A_TURNED: tl.constexpr,
    B_TURNED: tl.constexpr,
    HAS_C: tl.constexpr,
    UPCAST: tl.constexpr,
    SPECIALIZED: tl.constexpr,
):
    """One program computes one tile of BLOCK x (WIDE * BLOCK) of the lower triangle.

    `a_step` is 0 if all matrices of a stack are the same one, else 1. An operand is TURNED if its rows are contiguous
    dims instead of its columns.
    """
    side = tl.cdiv(M, BLOCK * WIDE)
    tiles = WIDE * (side * (side + 1) // 2)
    pid = tl.program_id(0)
    batch = pid // tiles
    top, left = tile_corner(pid % tiles, side, BLOCK, BLOCK * WIDE, BAND)
    acc = tl.zeros((BLOCK, BLOCK * WIDE), dtype=tl.float32)
    for k in tl.range(0, K, BLOCK_K, warp_specialize=SPECIALIZED):
        if A_TURNED:
            x = a.load([batch * a_step, k, top]).reshape(BLOCK_K, BLOCK).T
        else:
            x = a.load([batch * a_step, top, k]).reshape(BLOCK, BLOCK_K)
        if B_TURNED:
            y = b.load([batch * b_step, k, left]).reshape(BLOCK_K, BLOCK * WIDE)
        else:
            y = b.load([batch * b_step, left, k]).reshape(BLOCK * WIDE, BLOCK_K).T
        if UPCAST:
            x = x.to(tl.float32)
            y = y.to(tl.float32)
        acc = tl.dot(x, y, acc, input_precision="ieee")
    if WIDE == 1:
        _finish(acc, c, d, alpha, beta, diag, batch, c_step, top, left, BLOCK, HAS_C)
    else:
        west, east = tl.split(tl.permute(tl.reshape(acc, (BLOCK, 2, BLOCK)), (0, 2, 1)))
        _finish(west, c, d, alpha, beta, diag, batch, c_step, top, left, BLOCK, HAS_C)
        _finish(east, c, d, alpha, beta, diag, batch, c_step, top, left + BLOCK, BLOCK, HAS_C)


def launch_tma(tile: Tile, a: Tensor, b: Tensor, c: Tensor | None, d: Tensor, scalars: tuple[float, ...]) -> None:
    """Run the kernel. a, b: [B, M, K]; c, d: [B, M, M]; scalars: alpha, beta and diag.

    The caller checks the alignment: `tensor_args.alignment` of all tensors is 8 or more. c and d are row-major
    or column-major alike: a symmetric matrix is the same either way.
    """
    wide, rest = divmod(tile.n, tile.m)
    if rest or wide not in (1, 2):
        raise ValueError(f"a tile has to be one or two squares, not {tile.m} x {tile.n}")
    batch, m, k = a.shape
    square = (tile.m, tile.m)
    add = d if c is None else c  # where there is no C, D stands in its place and is not read
    sym_gemm_tma[(batch * tiles_of_triangle(m, tile),)](
        descriptor(a, (tile.m, tile.k)),
        descriptor(b, (tile.n, tile.k)),
        descriptor(add, square),
        descriptor(d, square),
        *scalars,
        m,
        k,
        step(a),
        step(b),
        step(add),
        BLOCK=tile.m,
        WIDE=wide,
        BLOCK_K=tile.k,
        BAND=tile.band,
        A_TURNED=turned(a),
        B_TURNED=turned(b),
        HAS_C=c is not None,
        UPCAST=INTERPRETED,
        SPECIALIZED=tile.specialized,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
