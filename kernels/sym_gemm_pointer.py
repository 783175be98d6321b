"""sym_gemm by pointers: any strides, any sizes, any architecture."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl
from torch import Tensor

from canzona_compile.kernels.dispatch import Tile, triangle
from canzona_compile.kernels.triangle import INTERPRETED, scalar, triangle_tile


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
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BAND: tl.constexpr,
    HAS_C: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One program computes one tile of the lower triangle and writes it twice, a tile of the diagonal once."""
    side = tl.cdiv(M, BLOCK)
    tiles = side * (side + 1) // 2
    pid = tl.program_id(0)
    # Offsets are 64 bits wide: a stack of 320 matrices of 2560 x 3072 is more than 32 bits can count.
    batch = (pid // tiles).to(tl.int64)
    i, j = triangle_tile(pid % tiles, side, BAND)
    rows = i * BLOCK + tl.arange(0, BLOCK)
    cols = j * BLOCK + tl.arange(0, BLOCK)
    ks = tl.arange(0, BLOCK_K)

    wide_rows = rows.to(tl.int64)
    wide_cols = cols.to(tl.int64)
    wide_ks = ks.to(tl.int64)
    a_tile = a + batch * a_batch + wide_rows[:, None] * a_row + wide_ks[None, :] * a_col
    b_tile = b + batch * b_batch + wide_cols[None, :] * b_row + wide_ks[:, None] * b_col
    acc = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        left = K - k
        x = tl.load(a_tile, mask=(rows[:, None] < M) & (ks[None, :] < left), other=0.0)
        y = tl.load(b_tile, mask=(cols[None, :] < M) & (ks[:, None] < left), other=0.0)
        if UPCAST:
            x = x.to(tl.float32)
            y = y.to(tl.float32)
        acc = tl.dot(x, y, acc, input_precision="ieee")
        a_tile += BLOCK_K * a_col
        b_tile += BLOCK_K * b_col

    inside = (rows[:, None] < M) & (cols[None, :] < M)
    result = acc * scalar(alpha)
    if HAS_C:
        c_tile = c + batch * c_batch + wide_rows[:, None] * c_row + wide_cols[None, :] * c_col
        result += scalar(beta) * tl.load(c_tile, mask=inside, other=0.0).to(tl.float32)
    here = d + batch * d_batch + wide_rows[:, None] * d_row + wide_cols[None, :] * d_col
    if i != j:
        value = result.to(d.dtype.element_ty)
        tl.store(here, value, mask=inside)
        there = d + batch * d_batch + wide_cols[:, None] * d_row + wide_rows[None, :] * d_col
        tl.store(there, tl.trans(value), mask=(cols[:, None] < M) & (rows[None, :] < M))
    else:
        value = tl.where(rows[:, None] == cols[None, :], result + scalar(diag), result).to(d.dtype.element_ty)
        # Both halves of a tile of the diagonal become the same bits.
        value = tl.where(rows[:, None] >= cols[None, :], value, tl.trans(value))
        tl.store(here, value, mask=inside)


def launch(tile: Tile, a: Tensor, b: Tensor, c: Tensor | None, d: Tensor, scalars: tuple[object, ...]) -> None:
    """Run the kernel. a, b: [B, M, K]; c, d: [B, M, M]; scalars: alpha, beta and diag, floats or 0-d tensors."""
    if tile.m != tile.n:
        raise ValueError(f"tiles have to be square here, not {tile.m} x {tile.n}")
    batch, m, k = a.shape
    c_or_a = d if c is None else c
    sym_gemm_pointer[(batch * triangle(-(-m // tile.m)),)](
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
        BLOCK=tile.m,
        BLOCK_K=tile.k,
        BAND=tile.band,
        HAS_C=c is not None,
        UPCAST=INTERPRETED,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
