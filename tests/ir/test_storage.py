"""Codes and scales of leaves of the state."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from canzona_compile.ir.storage import BLOCK, LARGEST, Storage, Stored, decode, encode, rounded, storage_of

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@st.composite
def values(draw: Any) -> torch.Tensor:
    shape = draw(st.sampled_from([(0, 5), (1,), (3, 1), (2, 127), (4, 128), (3, 129), (2, 2, 300), (5, 0)]))
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    size = 10.0 ** draw(st.integers(-30, 30))
    found = torch.randn(shape, generator=random, dtype=torch.float64)
    spread = torch.rand(shape, generator=random, dtype=torch.float64)
    found = found * 10 ** (-8 * spread) if draw(st.booleans()) else found
    dtype = draw(st.sampled_from(DTYPES))
    size = size if dtype in (torch.float32, torch.float64, torch.bfloat16) else 1.0
    return (found * size).to(dtype)


@settings(deadline=None)
@given(values())
def test_what_was_decoded_has_the_very_codes(value: torch.Tensor) -> None:
    codes, scales = encode(value)
    again = encode(decode(codes, scales, value.dtype))
    assert torch.equal(again[0], codes)
    assert torch.equal(again[1], scales)
    assert (codes.shape, scales.shape) == (value.shape, (*value.shape[:-1], -(-value.shape[-1] // BLOCK)))


@settings(deadline=None)
@given(values())
def test_how_far_codes_are_off(value: torch.Tensor) -> None:
    """At most half a scale, which is at most the largest magnitude of the block / 127, up to its own rounding."""
    codes, scales = encode(value)
    off = (decode(codes, scales, value.dtype).double() - value.double()).abs()
    each = scales.double().repeat_interleave(BLOCK, -1)[..., : value.shape[-1]]
    assert bool((off <= each / 2 * (1 + 1e-5)).all())
    if value.dtype in (torch.float32, torch.float64) and value.numel():
        least = torch.finfo(torch.float32).smallest_normal
        assert float(scales.max()) <= max(least, float(value.double().abs().max()) / LARGEST * (1 + 2**-16))


def test_fragments_have_the_codes_of_the_whole() -> None:
    whole = torch.randn(6, 700, generator=torch.Generator().manual_seed(0))
    codes, scales = encode(whole)
    for part, blocks in ((slice(0, 256), slice(0, 2)), (slice(256, 700), slice(2, 6))):
        own = encode(whole[2:5, part])
        assert torch.equal(own[0], codes[2:5, part])
        assert torch.equal(own[1], scales[2:5, blocks])


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_stays_so(dtype: torch.dtype) -> None:
    value = torch.ones(3, BLOCK, dtype=dtype)
    value[0, 3], value[1, 5] = float("nan"), float("inf")
    found = rounded(value, Storage("int8"))
    assert found[:2].isnan().all()
    torch.testing.assert_close(found[2], value[2], rtol=2**-16 if dtype.itemsize > 2 else 2**-7, atol=0.0)
    bits = value.clone()
    bits[1, 7] = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)[0]  # as CUDA spells NaN
    assert rounded(bits, Storage("int8"))[1].isnan().all()


@pytest.mark.parametrize("text", ["int8", "bfloat16", "cpu", "int8 cpu", "bfloat16 cpu"])
def test_a_stored_leaf(text: str) -> None:
    """It keeps its memory, gives back what rounding leaves with the strides that it had, and knows its size."""
    value = torch.randn(12, 200, generator=torch.Generator().manual_seed(0)).mT
    held = Stored(storage_of(text), value)
    assert torch.equal(held.open(), rounded(value, held.storage))
    memory = [tensor.data_ptr() for tensor in held.tensors]
    held.close(value * 3)
    assert [tensor.data_ptr() for tensor in held.tensors] == memory
    assert torch.equal(held.open(), rounded(value * 3, held.storage))
    assert held.open().stride() == value.stride()
    assert held.nbytes == held.storage.nbytes((200, 12), torch.float32)
    assert held.open().data_ptr() != held.tensors[0].data_ptr()


def test_a_stored_leaf_is_no_tensor() -> None:
    stored: Any = Stored(storage_of("int8"), torch.ones(2, 3))
    with pytest.raises(AttributeError, match="has no 'mul_': change it by state_dict"):
        stored.mul_(2)
    assert torch.equal(copy.deepcopy(stored).open(), stored.open())
    assert torch.equal(pickle.loads(pickle.dumps(stored)).open(), stored.open())
