"""The Triton kernels of `int8_blocks`."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl
from torch import Tensor

BLOCKS = 16  # of a program, of 128 elements each: with eight warps every thread has eight elements
# The compiler must not fuse or reorder what torch's operators round one by one.
OPTIONS = {"num_warps": 8, "enable_fp_fusion": False}
HALVES_TO_EVEN = tl.constexpr(12582912.0)  # 1.5 * 2^23: numbers below 2^22 lose their fractions when it is added


@triton.jit
def _places(width, per_row, count, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    """Numbers of this program's blocks, whether they exist, the places of their elements, and whether these exist."""
    number = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    column = (number % per_row * BLOCK)[:, None] + tl.arange(0, BLOCK)[None, :]
    there = number < count
    return number, there, (number // per_row).to(tl.int64)[:, None] * width + column, there[:, None] & (column < width)


@triton.jit
def decode_blocks(codes, scales, out, width, per_row, count, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    number, there, at, inside = _places(width, per_row, count, BLOCKS, BLOCK)
    scale = tl.load(scales + number, mask=there, other=0.0)
    value = tl.load(codes + at, mask=inside, other=0).to(tl.float32) * scale[:, None]
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def encode_blocks(value, codes, scales, width, per_row, count, least, low, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    number, there, at, inside = _places(width, per_row, count, BLOCKS, BLOCK)
    x = tl.load(value + at, mask=inside, other=0.0).to(tl.float32)
    size = tl.abs(x)
    finite = size < float("inf")
    largest = tl.max(tl.where(finite, size, 0.0), 1)
    bits = tl.div_rn(largest, tl.full(largest.shape, 127.0, tl.float32)).to(tl.int32, bitcast=True)
    scale = tl.maximum(((bits + low) & ~low).to(tl.float32, bitcast=True), least)
    ratio = tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape))
    code = (ratio + HALVES_TO_EVEN) - HALVES_TO_EVEN
    tl.store(codes + at, tl.where(finite, code, 0.0).to(tl.int8), mask=inside)
    most = (tl.div_rn(largest, scale) + HALVES_TO_EVEN) - HALVES_TO_EVEN
    scale = tl.where(most == 0.0, 0.0, scale)
    scale = tl.where(tl.min(finite.to(tl.int32), 1) > 0, scale, float("nan"))
    tl.store(scales + number, scale, mask=there)


def launch_decode(codes: Tensor, scales: Tensor, out: Tensor, block: int) -> None:
    """Write scale * code, rounded to the dtype of `out`. All are contiguous."""
    count = scales.numel()
    grid = (triton.cdiv(count, BLOCKS),)
    decode_blocks[grid](codes, scales, out, *_sizes(codes, scales), BLOCKS=BLOCKS, BLOCK=block, **OPTIONS)


def launch_encode(value: Tensor, codes: Tensor, scales: Tensor, block: int, least: float, low: int) -> None:
    """Write the codes and the scales of a value. All are contiguous."""
    count = scales.numel()
    grid = (triton.cdiv(count, BLOCKS),)
    encode_blocks[grid](value, codes, scales, *_sizes(codes, scales), least, low, BLOCKS=BLOCKS, BLOCK=block, **OPTIONS)


def _sizes(codes: Tensor, scales: Tensor) -> tuple[int, int, int]:
    """Elements of a row, blocks of a row, blocks."""
    return codes.shape[-1], scales.shape[-1], scales.numel()
