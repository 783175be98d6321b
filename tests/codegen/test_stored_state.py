"""Kernels that open and round stored state themselves: the bits of torch's operators, however fragments lie."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from canzona_compile.codegen.launch import GroupedKernel
from canzona_compile.ir.storage import Storage, Stored, room, rules_of
from tests.lowering.emitted_steps import emitted

pytest.importorskip("triton")
MOMENTUM = 0.75
Lay = Any  # a tensor with other strides, equal in all else


def transposed(value: Tensor) -> Tensor:
    return value.t().contiguous().t()


def sliced(value: Tensor) -> Tensor:
    return torch.cat([value, value], -1)[:, : value.shape[-1]]


@pytest.mark.parametrize("lay", [torch.clone, transposed, sliced])
@pytest.mark.parametrize("state", ["int8", "bfloat16"])
@pytest.mark.parametrize("shape", [(16, 128), (3, 4096), (7, 384)], ids=str)
def test_prepare_has_the_bits_of_torch(lay: Lay, state: str, shape: tuple[int, int]) -> None:
    """Muon's: the momentum goes a quarter of the way to the gradient, what is sent three quarters back."""
    step = emitted("muon", (1, 1), matrices=1, shapes=(shape,), state=rules_of({"momentum_buffer": state}))
    kernel = step.program.module.get_submodule("g0_prepare")
    assert isinstance(kernel, GroupedKernel)
    random = torch.Generator().manual_seed(1)
    grad = lay(torch.randn(shape, generator=random))
    stored = Stored(Storage(state), torch.randn(shape, generator=random) * 1e-3)
    average = stored.open().lerp(grad, 1 - MOMENTUM)
    expected = grad.lerp(average, MOMENTUM).bfloat16()
    low = torch.empty(shape, dtype=torch.bfloat16)
    new = room([stored])[0] if state == "int8" else stored.tensors[0]
    kernel(([[own] for own in (*stored.tensors, grad, low, new)], [1 - MOMENTUM, MOMENTUM]))
    assert torch.equal(low, expected)
    assert torch.equal(new, average.to(new.dtype))
