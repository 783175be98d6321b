"""gemm_axpby in Triton, in one pass, y is not x: by pointers; by tensor descriptors (TMA), for sm_90 and later."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl
from torch import Tensor

from canzona_compile.kernels.dispatch import Tile
from canzona_compile.kernels.triton_parts import INTERPRETED, descriptor, step, turned


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
    result = acc * beta + alpha * tl.load(own, mask=inside, other=0.0).to(tl.float32)
    value = result.to(y.dtype.element_ty)
    tl.store(y + batch * y_batch + wide_rows[:, None] * y_row + wide_cols[None, :] * y_col, value, mask=inside)


def launch_pointer(tile: Tile, f: Tensor, x: Tensor, y: Tensor, scalars: tuple[float, float]) -> None:
    """Compute y = alpha * x + beta * f @ x on the GPU.

    Args:
        f: [B, M, M], any strides.
        x, y: [B, M, N], any strides; the sum is rounded to y's dtype.
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


# -- by tensor descriptors ------------------------------------------------------------------------


@triton.jit
def _finish(acc, add, y, alpha, beta, batch, add_step, top, left, BLOCK: tl.constexpr):
    """Scale one square block, add to it and write it."""
    own = add.load([batch * add_step, top, left]).reshape(BLOCK, BLOCK)
    result = acc * beta + alpha * own.to(tl.float32)
    y.store([batch, top, left], result.to(y.dtype).reshape(1, BLOCK, BLOCK))


@triton.jit
def gemm_axpby_tma(
    left,
    right,
    add,
    y,
    alpha,
    beta,
    M,
    N,
    K,
    left_step,
    right_step,
    add_step,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BAND: tl.constexpr,
    LEFT_TURNED: tl.constexpr,
    RIGHT_TURNED: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Y = alpha * S + beta * L @ R, one tile of BLOCK x (WIDE * BLOCK) per program. L: M x K, R: K x N, S, Y: M x N."""
    down = tl.cdiv(M, BLOCK)
    across = tl.cdiv(N, BLOCK * WIDE)
    pid = tl.program_id(0)
    batch = pid // (down * across)
    n = pid % (down * across)
    # Programs walk BAND rows of tiles together, column by column, for the L2 cache.
    first = n // (BAND * across) * BAND
    height = tl.minimum(down - first, BAND)
    row = (first + (n - first * across) % height) * BLOCK
    col = (n - first * across) // height * (BLOCK * WIDE)

    acc = tl.zeros((BLOCK, BLOCK * WIDE), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        if LEFT_TURNED:
            u = left.load([batch * left_step, k, row]).reshape(BLOCK_K, BLOCK).T
        else:
            u = left.load([batch * left_step, row, k]).reshape(BLOCK, BLOCK_K)
        if RIGHT_TURNED:
            v = right.load([batch * right_step, col, k]).reshape(BLOCK * WIDE, BLOCK_K).T
        else:
            v = right.load([batch * right_step, k, col]).reshape(BLOCK_K, BLOCK * WIDE)
        if UPCAST:
            u = u.to(tl.float32)
            v = v.to(tl.float32)
        acc = tl.dot(u, v, acc, input_precision="ieee")

    if WIDE == 1:
        _finish(acc, add, y, alpha, beta, batch, add_step, row, col, BLOCK)
    else:
        halves = tl.permute(tl.reshape(acc, (BLOCK, 2, BLOCK)), (0, 2, 1))
        west, east = tl.split(halves)
        _finish(west, add, y, alpha, beta, batch, add_step, row, col, BLOCK)
        _finish(east, add, y, alpha, beta, batch, add_step, row, col + BLOCK, BLOCK)


def launch_tma(tile: Tile, left: Tensor, right: Tensor, add: Tensor, y: Tensor, scalars: tuple[float, ...]) -> None:
    """Run the kernel. left: [B, M, K]; right: [B, K, N]; add, y: [B, M, N], turned alike; scalars: alpha and beta.

    The caller checks the alignment: `tensor_args.alignment` of all tensors is 8 or more.
    """
    wide, rest = divmod(tile.n, tile.m)
    if rest or wide not in (1, 2):
        raise ValueError(f"a tile has to be one or two squares, not {tile.m} x {tile.n}")
    if turned(y):  # its transpose is row-major
        left, right, add, y = right.mT, left.mT, add.mT, y.mT
    batch, m, k = left.shape
    n = right.shape[2]
    square = (tile.m, tile.m)
    gemm_axpby_tma[(batch * -(-m // tile.m) * -(-n // tile.n),)](
        descriptor(left, (tile.m, tile.k)),
        descriptor(right, (tile.k, tile.n)),
        descriptor(add, square),
        descriptor(y, square),
        *scalars,
        m,
        n,
        k,
        step(left),
        step(right),
        step(add),
        BLOCK=tile.m,
        WIDE=wide,
        BLOCK_K=tile.k,
        BAND=tile.band,
        LEFT_TURNED=turned(left),
        RIGHT_TURNED=turned(right),
        UPCAST=INTERPRETED,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
