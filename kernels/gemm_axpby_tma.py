"""gemm_axpby by tensor descriptors (TMA), for sm_90 and later: rows begin at multiples of 16 bytes, and y is not x."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl
from torch import Tensor

from canzona_compile.kernels.descriptors import descriptor, step, turned
from canzona_compile.kernels.dispatch import Tile
from canzona_compile.kernels.triangle import INTERPRETED, scalar


@triton.jit
def _finish(acc, add, y, alpha, beta, batch, add_step, top, left, BLOCK: tl.constexpr):
    """Scale one square block, add to it and write it."""
    own = add.load([batch * add_step, top, left]).reshape(BLOCK, BLOCK)
    result = acc * scalar(beta) + scalar(alpha) * own.to(tl.float32)
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


def launch(tile: Tile, left: Tensor, right: Tensor, add: Tensor, y: Tensor, scalars: tuple[object, ...]) -> None:
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
