"""The operators `canzona::...`: what torch's tracers and compilers need of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from canzona_compile.kernels.ops import GEMM_AXPBY, PAD_CAST, SYM_GEMM
from tests.kernels.kernel_cases import random

Call = tuple[Any, tuple[Any, ...], dict[str, Any]]


def calls() -> dict[str, Call]:
    x, square = random(2, 5, 3, dtype=torch.float32), random(2, 5, 5, dtype=torch.float32, seed=1)
    even = square @ square.mT + torch.eye(5)
    return {
        "sym_gemm": (SYM_GEMM, (x, None, even), {"alpha": 0.5, "beta": -2.0}),
        "gemm_axpby": (GEMM_AXPBY, (square, x), {"beta": 0.5}),
        "pad_cast": (PAD_CAST, (x,), {"dtype": torch.float16}),
    }


NAMES = list(calls())
each = pytest.mark.parametrize("name", NAMES)


def values(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def same(found: Any, expected: Any) -> bool:
    return all(map(torch.equal, values(found), values(expected)))


@each
def test_torchs_own_checks(name: str) -> None:
    op, args, kwargs = calls()[name]
    torch.library.opcheck(op, args, kwargs, test_utils=("test_schema", "test_faketensor"))


@each
def test_it_writes_to_nothing_and_its_results_are_new(name: str) -> None:
    op, args, kwargs = calls()[name]
    assert not op._schema.is_mutable
    assert not any(argument.alias_info for argument in (*op._schema.arguments, *op._schema.returns))
    assert torch.Tag.pt2_compliant_tag in op.tags
    given = [x for x in args if isinstance(x, Tensor)]
    before = [x.clone() for x in given]
    results = values(op(*args, **kwargs))
    assert all(map(torch.equal, given, before))
    places = {x.untyped_storage().data_ptr() for x in given}
    assert all(x.untyped_storage().data_ptr() not in places and x.is_contiguous() for x in results)


@each
def test_it_is_one_node_of_a_traced_graph(name: str) -> None:
    op, args, kwargs = calls()[name]
    x, *rest = args
    traced = make_fx(lambda x: op(x, *rest, **kwargs), tracing_mode="fake", _allow_non_fake_inputs=True)(x)
    assert next(n.target for n in traced.graph.nodes if n.op == "call_function") is op
    assert same(traced(x), op(*args, **kwargs))


@each
def test_it_compiles_without_a_graph_break(name: str) -> None:
    op, args, kwargs = calls()[name]
    compiled: Callable[..., Any] = torch.compile(lambda *own: op(*own, **kwargs), backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        assert same(compiled(*args), op(*args, **kwargs))


@each
def test_fake_results_are_as_the_real_ones(name: str) -> None:
    op, args, kwargs = calls()[name]
    real = values(op(*args, **kwargs))
    with FakeTensorMode() as mode:
        fake = values(op(*(mode.from_tensor(x) if isinstance(x, Tensor) else x for x in args), **kwargs))
    facts = [(x.shape, x.stride(), x.dtype, x.device) for x in real]
    assert [(x.shape, x.stride(), x.dtype, x.device) for x in fake] == facts


def test_on_cuda_the_kernels_run() -> None:
    """Without a device: which function the dispatcher has for it."""
    for op in (SYM_GEMM, GEMM_AXPBY):
        assert op.has_kernel_for_dispatch_key(torch.DispatchKey.CUDA)
        assert op.has_kernel_for_dispatch_key(torch.DispatchKey.CPU)
    with FakeTensorMode(allow_non_fake_inputs=True):
        there = torch.empty(2, 5, 3, device="cuda", dtype=torch.float16)
        assert SYM_GEMM(there).device.type == "cuda"
        assert SYM_GEMM(there).shape == (2, 5, 5)
