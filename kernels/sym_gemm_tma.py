"""sym_gemm by tensor descriptors (TMA), for sm_90 and later: rows begin at multiples of 16 bytes."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl
from torch import Tensor

from canzona_compile.kernels.descriptors import descriptor, step, turned
from canzona_compile.kernels.dispatch import Tile, tiles_of_triangle
from canzona_compile.kernels.triangle import INTERPRETED, scalar, tile_corner


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
        result = acc * scalar(alpha)
        if HAS_C:
            add = c.load([batch * c_step, top, left]).reshape(BLOCK, BLOCK)
            result += scalar(beta) * add.to(tl.float32)
        if top != left:
            value = result.to(d.dtype)
            d.store([batch, top, left], value.reshape(1, BLOCK, BLOCK))
            d.store([batch, left, top], tl.trans(value).reshape(1, BLOCK, BLOCK))
        else:
            rows = tl.arange(0, BLOCK)[:, None]
            cols = tl.arange(0, BLOCK)[None, :]
            value = tl.where(rows == cols, result + scalar(diag), result).to(d.dtype)
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


def launch(tile: Tile, a: Tensor, b: Tensor, c: Tensor | None, d: Tensor, scalars: tuple[object, ...]) -> None:
    """Run the kernel. a, b: [B, M, K]; c, d: [B, M, M]; scalars: alpha, beta and diag, floats or 0-d tensors.

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
