"""Operators with numbers in tensors: as near to exact as with plain numbers, and of the same dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from canzona_compile.codegen.step_words import StepWords
from canzona_compile.ir.program_ops import each
from canzona_compile.kernels.ops import GEMM_AXPBY, SYM_GEMM
from canzona_compile.runtime.scalar_ops import FORMS, DeviceNumber

aten = torch.ops.aten
CPU = torch.device("cpu")
BOUNDS = {torch.float64: 1e-15, torch.float32: 3e-7, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def number_of(value: float) -> DeviceNumber:
    words = StepWords(DeviceNumber.WORDS, CPU)
    made = DeviceNumber(words, 0)
    made.fill(value)
    words.send()
    return made


CALLS: dict[Any, Callable[[Tensor, Tensor, Tensor, Any], tuple[tuple[Any, ...], dict[str, Any]]]] = {
    aten.mul.Tensor: lambda x, y, z, s: ((x, s), {}),
    aten.div.Tensor: lambda x, y, z, s: ((x, s), {}),
    aten.add.Tensor: lambda x, y, z, s: ((x, y), {"alpha": s}),
    aten.sub.Tensor: lambda x, y, z, s: ((x, y), {"alpha": s}),
    aten.lerp.Scalar: lambda x, y, z, s: ((x, y, s), {}),
    aten.addcmul.default: lambda x, y, z, s: ((x, y, z), {"value": s}),
    aten.addcdiv.default: lambda x, y, z, s: ((x, y, z), {"value": s}),
}


# Products: what runs on CUDA, of which the library's way is taken here.
PRODUCTS: dict[Any, Callable[[Tensor, Tensor, Tensor, Any], tuple[tuple[Any, ...], dict[str, Any]]]] = {
    SYM_GEMM: lambda x, y, z, s: ((x, None, y), {"alpha": s, "beta": s, "diag": s}),
    GEMM_AXPBY: lambda x, y, z, s: ((x, z), {"alpha": s, "beta": s}),
}


def in_place(op: Any) -> Any:
    return getattr(getattr(aten, f"{op.overloadpacket.__name__}_"), op._overloadname)


@pytest.mark.parametrize("op", CALLS, ids=str)
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@settings(max_examples=15, deadline=None)
@given(value=st.floats(-3, 3).filter(lambda v: abs(v) > 0.1), seed=st.integers(0, 2**16))
def test_an_operator_takes_its_number_in_a_tensor(op: Any, dtype: torch.dtype, value: float, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    x, y, z = (torch.rand(7, 5, generator=random, dtype=torch.float64).add(0.5).to(dtype) for _ in range(3))
    args, kwargs = CALLS[op](x, y, z, value)
    exact = op(*(a.double() if isinstance(a, Tensor) else a for a in args), **kwargs)
    args, kwargs = CALLS[op](x, y, z, number_of(value))
    found = FORMS[op](*args, **kwargs)
    scale = (1 + abs(value)) * 12  # of the largest term, so that cancellation does not count
    assert found.dtype == dtype
    assert (found.double() - exact).abs().max() <= BOUNDS[dtype] * scale
    own = x.clone()
    args, kwargs = CALLS[op](own, y, z, number_of(value))
    assert FORMS[in_place(op)](*args, **kwargs) is own
    assert torch.equal(own, found)


def test_every_form_is_tested() -> None:
    assert set(FORMS) == {*CALLS, *map(in_place, CALLS), *PRODUCTS}


@pytest.mark.parametrize("op", PRODUCTS, ids=str)
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_a_product_takes_its_numbers_in_tensors(op: Any, dtype: torch.dtype) -> None:
    """Stacked, and for every task; numbers that stay numbers may stand beside them."""
    random = torch.Generator().manual_seed(0)
    x, y, z = (torch.rand(3, 6, 6, generator=random, dtype=torch.float64) for _ in range(3))
    x, y, z = x.to(dtype), (y + y.mT).to(dtype), z.to(dtype)
    for value in (0.7, -1.3):
        args, kwargs = PRODUCTS[op](x, y, z, value)
        exact = op(*(a.double() if isinstance(a, Tensor) else a for a in args), **kwargs)
        args, numbered = PRODUCTS[op](x, y, z, number_of(value))
        for some in (numbered, {**numbered, "beta": value}):
            found = FORMS[op](*args, **some)
            assert found.dtype == dtype
            assert (found.double() - exact).abs().max() <= BOUNDS[dtype] * 40
            lists = [None if a is None else list(a) for a in args]
            for one, expected in zip(each(FORMS[op], *lists, **some), found, strict=True):
                torch.testing.assert_close(one, expected, rtol=BOUNDS[dtype] * 4, atol=BOUNDS[dtype] * 40)


@pytest.mark.parametrize("op", [aten.addcmul.default, aten.addcdiv.default], ids=str)
def test_the_quotient_or_product_of_tensors_is_rounded_before_it_is_scaled(op: Any) -> None:
    """As CUDA's kernels do it, whose bits a recording is to keep (the CPU's multiply from the left)."""
    random = torch.Generator().manual_seed(0)
    x, y, z = (torch.rand(999, generator=random) + 0.5 for _ in range(3))
    inner = y * z if op is aten.addcmul.default else y / z
    expected = torch.addcmul(x, inner, torch.tensor(0.3))
    assert torch.equal(FORMS[op](x, y, z, value=number_of(0.3)), expected)


@pytest.mark.parametrize("op", [aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor], ids=str)
def test_a_counter_of_a_state_keeps_its_dtype(op: Any) -> None:
    """0-d tensors would take the dtype of a 0-d number of 64 bits."""
    assert FORMS[op](torch.tensor(2.0), number_of(3.0)).dtype == torch.float32
    assert FORMS[op](torch.tensor(2.0), number_of(3.0)) == op(torch.tensor(2.0), 3.0)
    assert FORMS[op](torch.tensor([2]), number_of(3.0)).dtype == op(torch.tensor([2]), 3.0).dtype


def test_numbers_are_sent_when_they_change() -> None:
    words = StepWords(3 * DeviceNumber.WORDS, CPU)
    numbers = [DeviceNumber(words, DeviceNumber.WORDS * i) for i in range(3)]
    for values, sent in (((0.1, 0.2, 0.3), 48), ((0.1, 0.2, 0.3), 0), ((0.1, 0.5, 0.3), 16), ((1e300, 0.5, -0.0), 48)):
        for number, value in zip(numbers, values, strict=True):
            number.fill(value)
        before = words.copied
        words.send()
        assert words.copied - before == sent
        assert [float(number.double) for number in numbers] == list(values)
        assert [float(number.single) for number in numbers] == torch.tensor(values).tolist()
    assert words.copies == 3
