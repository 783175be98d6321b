"""int8 blocks in Triton's interpreter: the bits of torch's operators."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings

from canzona_compile.ir.storage import BLOCK, CODE_DIGITS, Storage, decode, encode, low_bits
from canzona_compile.kernels import int8_blocks
from tests.ir.test_storage import DTYPES, values
from tests.kernels.kernel_cases import interpreted

pytestmark = interpreted


def by_kernels(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scales, and what they stand for."""
    codes, scales = (
        torch.full(shape, 3, dtype=kind) for shape, kind in Storage("int8").shapes(value.shape, value.dtype)
    )
    least = 2.0**-24 if value.dtype == torch.float16 else torch.finfo(torch.float32).smallest_normal
    low = low_bits(1 if value.dtype.itemsize == 2 else 24 - CODE_DIGITS)
    int8_blocks.encode(value, (codes, scales), BLOCK, least, low)
    return codes, scales, int8_blocks.decode(codes, scales, value.dtype, BLOCK)


@settings(deadline=None, max_examples=40)
@given(values())
def test_bits_of_torch(value: torch.Tensor) -> None:
    if not value.numel():
        return
    expected = encode(value)
    codes, scales, back = by_kernels(value)
    assert torch.equal(codes, expected[0])
    assert torch.equal(scales, expected[1])
    assert torch.equal(back, decode(*expected, value.dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_blocks_with_infinities_and_nans(dtype: torch.dtype) -> None:
    value = torch.randn(3, 4 * BLOCK + 5).to(dtype)
    value[0, 1], value[1, BLOCK], value[2, -1] = math.inf, math.nan, -math.inf
    value[0, 2 * BLOCK : 3 * BLOCK] = 0.0
    expected = encode(value)
    _, scales, back = by_kernels(value)
    assert torch.equal(scales.nan_to_num(7.0), expected[1].nan_to_num(7.0))
    assert torch.equal(back.nan_to_num(7.0), decode(*expected, dtype).nan_to_num(7.0))


def test_on_cpu_torch_does_it() -> None:
    assert not int8_blocks.usable(torch.ones(3, 4))
