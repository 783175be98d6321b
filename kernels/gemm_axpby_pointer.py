"""gemm_axpby by pointers: alpha * X + beta * F @ X in one pass."""
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
    alpha,
    beta,
    M,
    N,
    f_batch,
    f_row,
    f_col,
    x_batch,
    x_row,
    x_col,
    y_batch,
    y_row,
    y_col,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BAND: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One program computes one tile of Y. F is M x M, X is M x N."""
    down = tl.cdiv(M, BLOCK_M)
    across = tl.cdiv(N, BLOCK_N)
    pid = tl.program_id(0)
    batch = (pid // (down * across)).to(tl.int64)
    n = pid % (down * across)
    # Programs walk BAND rows of tiles together, column by column, for the L2 cache.
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
    tl.store(y + batch * y_batch + wide_rows[:, None] * y_row + wide_cols[None, :] * y_col, value, mask=inside)


def launch(tile: Tile, f: Tensor, x: Tensor, y: Tensor, scalars: tuple[object, object]) -> None:
    """Compute y = alpha * x + beta * f @ x on the GPU.

    Args:
        tile: the kernel's configuration.
        f: [B, M, M], any strides.
        x, y: [B, M, N], any strides; the sum is rounded to y's dtype.
        scalars: alpha and beta, floats or 0-d tensors.
    """
    batch, m, n = x.shape
    gemm_axpby_pointer[(batch * -(-m // tile.m) * -(-n // tile.n),)](
        f,
        x,
        y,
        *scalars,
        m,
        n,
        *f.stride(),
        *x.stride(),
        *y.stride(),
        BLOCK_M=tile.m,
        BLOCK_N=tile.n,
        BLOCK_K=tile.k,
        BAND=tile.band,
        UPCAST=INTERPRETED,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
