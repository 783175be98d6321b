"""sym_gemm by tensor descriptors, with as many programs as processors: each computes several tiles, one after another.

The compiler makes one loop of the tiles and of the products within a tile. So the first operands of the next tile are
on their way while a tile is scaled and written, which a program for each tile can do for another program's tile only
where two of them fit on a processor.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl
from torch import Tensor

from canzona_compile.kernels.descriptors import step
from canzona_compile.kernels.dispatch import Tile, tiles_of_triangle
from canzona_compile.kernels.sym_gemm_tma import described, halves, options, product_tile
from canzona_compile.kernels.triangle import scalar, tile_corner

BEYOND = tl.constexpr(1 << 24)  # a matrix that no stack has; what a descriptor reads there is 0, and nothing is written


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
    """Scale one square block, add to it, and write it to both sides of the diagonal, on the diagonal once.

    A block above the diagonal, and the mirror image of one on it, are written beyond the stack: Triton 3.7 does not
    compile stores under a condition in such a loop.
    """
    result = acc * scalar(alpha)
    if HAS_C:
        add = c.load([tl.where(top >= left, batch * c_step, BEYOND), top, left]).reshape(BLOCK, BLOCK)
        result += scalar(beta) * add.to(tl.float32)
    rows = top + tl.arange(0, BLOCK)[:, None]
    cols = left + tl.arange(0, BLOCK)[None, :]
    value = tl.where(rows == cols, result + scalar(diag), result).to(d.dtype)
    mirror = tl.trans(value)
    # Both halves of a block of the diagonal become the same bits.
    value = tl.where(rows >= cols, value, mirror)
    d.store([tl.where(top >= left, batch, BEYOND), top, left], value.reshape(1, BLOCK, BLOCK))
    d.store([tl.where(top > left, batch, BEYOND), left, top], mirror.reshape(1, BLOCK, BLOCK))


@triton.jit(do_not_specialize=["stack"])
def sym_gemm_persistent(
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
    stack,
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
    """As `sym_gemm_tma`; `stack` counts the matrices."""
    side = tl.cdiv(M, BLOCK * WIDE)
    tiles = WIDE * (side * (side + 1) // 2)
    programs = tl.num_programs(0)
    for n in tl.range(tl.program_id(0), stack * tiles, programs, flatten=True, warp_specialize=SPECIALIZED):
        batch = n // tiles
        top, left = tile_corner(n % tiles, side, BLOCK, BLOCK * WIDE, BAND)
        acc = product_tile(
            a, b, K, batch * a_step, batch * b_step, top, left,
            BLOCK, WIDE, BLOCK_K, A_TURNED, B_TURNED, UPCAST, False,
        )  # fmt: skip
        if WIDE == 1:
            _finish(acc, c, d, alpha, beta, diag, batch, c_step, top, left, BLOCK, HAS_C)
        else:
            first, second = halves(acc, BLOCK)
            _finish(first, c, d, alpha, beta, diag, batch, c_step, top, left, BLOCK, HAS_C)
            _finish(second, c, d, alpha, beta, diag, batch, c_step, top, left + BLOCK, BLOCK, HAS_C)


def launch(
    tile: Tile, a: Tensor, b: Tensor, c: Tensor | None, d: Tensor, scalars: tuple[object, ...], processors: int
) -> None:
    """Run the kernel; the arguments are those of `sym_gemm_tma.launch`, and how many programs there are at most."""
    batch, m, k = a.shape
    operands = described(tile, a, b, c, d)
    steps = step(a), step(b), step(d if c is None else c)
    programs = min(processors, batch * tiles_of_triangle(m, tile))
    sym_gemm_persistent[(programs,)](*operands, *scalars, m, k, *steps, batch, **options(tile, a, b, c))
