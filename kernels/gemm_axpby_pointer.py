"""gemm_axpby by pointers: alpha * X + beta * F @ X in one pass, with the last step's update of parameters."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl
from torch import Tensor

from canzona_compile.kernels.dispatch import Tile
from canzona_compile.kernels.triangle import INTERPRETED, scalar


@triton.jit
def gemm_axpby_pointer(
    f,
    x,
    y,
    p,
    alpha,
    beta,
    lr,
    decay,
    scale,
    M,
    N,
    p_rows,
    p_columns,
    f_batch,
    f_row,
    f_col,
    x_batch,
    x_row,
    x_col,
    y_batch,
    y_row,
    y_col,
    p_batch,
    p_row,
    p_col,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BAND: tl.constexpr,
    UPDATE: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One program computes one tile of Y, and writes it, or what it makes of the parameter. F is M x M, X is M x N."""
    down = tl.cdiv(M, BLOCK_M)
    across = tl.cdiv(N, BLOCK_N)
    pid = tl.program_id(0)
    batch = (pid // (down * across)).to(tl.int64)
    n = pid % (down * across)
    # BAND rows of tiles are walked together, column by column, for the L2 cache.
    top = n // (BAND * across) * BAND
    height = tl.minimum(down - top, BAND)
    i = top + (n - top * across) % height
    j = (n - top * across) // height
    rows = i * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = j * BLOCK_N + tl.arange(0, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)

    wide_rows = rows.to(tl.int64)
    wide_cols = cols.to(tl.int64)
    wide_ks = ks.to(tl.int64)
    f_tile = f + batch * f_batch + wide_rows[:, None] * f_row + wide_ks[None, :] * f_col
    x_tile = x + batch * x_batch + wide_ks[:, None] * x_row + wide_cols[None, :] * x_col
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, M, BLOCK_K):
        left = M - k
        u = tl.load(f_tile, mask=(rows[:, None] < M) & (ks[None, :] < left), other=0.0)
        v = tl.load(x_tile, mask=(ks[:, None] < left) & (cols[None, :] < N), other=0.0)
        if UPCAST:
            u = u.to(tl.float32)
            v = v.to(tl.float32)
        acc = tl.dot(u, v, acc, input_precision="ieee")
        f_tile += BLOCK_K * f_col
        x_tile += BLOCK_K * x_row

    inside = (rows[:, None] < M) & (cols[None, :] < N)
    own = x + batch * x_batch + wide_rows[:, None] * x_row + wide_cols[None, :] * x_col
    result = acc * scalar(beta) + scalar(alpha) * tl.load(own, mask=inside, other=0.0).to(tl.float32)
    value = result.to(y.dtype.element_ty)
    if UPDATE:
        # The parameter may be smaller than X, which is padded. Y is rounded first, as it would be in memory.
        rate = scalar(lr)
        at = p + batch * p_batch + wide_rows[:, None] * p_row + wide_cols[None, :] * p_col
        held = (rows[:, None] < p_rows) & (cols[None, :] < p_columns)
        old = tl.load(at, mask=held, other=0.0).to(tl.float32)
        new = (1.0 - rate * scalar(decay)) * old - rate * scalar(scale) * value.to(tl.float32)
        tl.store(at, new.to(p.dtype.element_ty), mask=held)
    else:
        tl.store(y + batch * y_batch + wide_rows[:, None] * y_row + wide_cols[None, :] * y_col, value, mask=inside)


def launch(tile: Tile, f: Tensor, x: Tensor, y: Tensor | None, p: Tensor | None, scalars: tuple[object, ...]) -> None:
    """Run it. f: [B, M, M]; x, y: [B, M, N]; p: [B, m, n] with m <= M, n <= N, in the place of y.

    scalars: alpha, beta, lr, weight decay and scale, floats or 0-d tensors.
    """
    batch, m, n = x.shape
    result = x if y is None else y  # of the dtype to which Y is rounded
    param = result if p is None else p
    gemm_axpby_pointer[(batch * -(-m // tile.m) * -(-n // tile.n),)](
        f,
        x,
        result,
        param,
        *scalars,
        m,
        n,
        *param.shape[1:],
        *f.stride(),
        *x.stride(),
        *result.stride(),
        *param.stride(),
        BLOCK_M=tile.m,
        BLOCK_N=tile.n,
        BLOCK_K=tile.k,
        BAND=tile.band,
        UPDATE=p is not None,
        UPCAST=INTERPRETED,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
