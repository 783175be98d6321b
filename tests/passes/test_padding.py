"""Matrices of odd sizes on CUDA are padded once, and what leaves them is what it was."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, fx

from canzona_compile.ir.fx_utils import tensor_value
from canzona_compile.ir.step import Placed
from canzona_compile.kernels.ops import DIV_CAST, PAD_CAST, SYM_GEMM
from canzona_compile.lowering.symmetric_products import rewritten
from canzona_compile.machine.hardware import Machine
from canzona_compile.passes import Padding
from canzona_compile.passes.padding import padded, wanted
from tests.harness.marks import crossed, first
from tests.harness.random_graphs import evaluate
from tests.harness.samples import Builder, empty
from tests.passes.symmetric_graphs import (
    algebra,
    aten,
    calls,
    close,
    in_float64,
    muon_history,
    on_cpu,
    shapes_of,
    values,
)

BF16 = torch.bfloat16
SHAPE = (47, 95)
PRODUCTS = (SYM_GEMM, torch.ops.canzona.gemm_axpby.default, aten.mm.default, aten.addmm.default)


def cuts(numerics: Any, shape: tuple[int, int]) -> tuple[Placed, Placed]:
    history = muon_history(numerics, shape)
    return history.step_at("symmetry").placed[0], history.step_at("padding").placed[0]


def sizes(graph: fx.Graph) -> set[int]:
    """Of all matrices in 16 bits that products read or return."""
    products = [n for n in graph.nodes if n.target in PRODUCTS]
    read = [v for p in products for n in [p, *p.all_input_nodes] if (v := tensor_value(n)) is not None]
    return {size for value in read for size in value.shape}


@pytest.mark.parametrize(("shape", "numerics"), crossed([SHAPE, SHAPE[::-1], (47, 64)], ["exact", "fast"], most=2))
def test_muon(numerics: str, shape: tuple[int, int]) -> None:
    before, after = cuts(numerics, shape)
    assert calls(after.compute).count(PAD_CAST) == 1
    assert sizes(after.compute) == {wanted(size) for size in shape}
    assert any(size % 16 for size in sizes(before.compute))
    wire = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    given_values = {"_to_copy": wire, "eps": 1e-7}
    found, expected = (evaluate(in_float64(p.compute), given_values) for p in (after, before))
    assert found[0].shape == expected[0].shape
    assert close(found, expected, 1e-10)
    assert (after.cost, after.flops, after.scatter) == (before.cost, before.flops, before.scatter)


def test_a_gram_iteration_is_padded_once_it_is_normalised() -> None:
    _, after = cuts("fast", SHAPE)
    pads = [n for n in after.compute.nodes if n.target is PAD_CAST]
    assert [tuple(p.meta["val"].shape) for p in pads] == [(48, 96)]
    assert pads[0].kwargs == {"dtype": torch.float16}
    assert [n.target for n in pads[0].all_input_nodes] == [DIV_CAST]


@pytest.mark.parametrize("numerics", ["exact", "fast"])
def test_stacks_of_tasks(numerics: Any) -> None:
    step = muon_history(numerics, SHAPE, SHAPE).step_at("scheduled")
    (cut,) = step.placed
    assert cut.stacked is not None
    assert calls(cut.stacked.graph).count(PAD_CAST) == 1
    wires = torch.randn(2, *SHAPE, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    (found,) = evaluate(in_float64(cut.stacked.graph), {"_to_copy": wires, "eps": 1e-7})
    one_by_one = [evaluate(in_float64(cut.compute), {"_to_copy": w, "eps": 1e-7})[0] for w in wires]
    assert close(list(found), one_by_one)


@pytest.mark.parametrize("shape", first([(64, 128), (40, 640), (20, 30)]))
def test_nothing_to_pad(shape: tuple[int, int]) -> None:
    """Aligned already, or so small that padding would be more work than it saves."""
    before, after = cuts("exact", shape)
    assert after.compute is before.compute


def test_on_cpu_nothing_changes() -> None:
    step = replace(muon_history("exact", SHAPE).step_at("symmetry"), machine=Machine("cpu", "gloo", 1))
    assert Padding()(step) is step


# -- the corner ------------------------------------------------------------------------------------


def shifts(b: Builder, matrix: fx.Node, by: Any, name: str) -> fx.Node:
    diagonal = b.call(f"{name}_d", aten.diagonal.default, matrix, 0, -2, -1)
    moved = b.call(f"{name}_a", aten.add.Tensor, diagonal, by)
    return b.call(name, aten.diagonal_scatter.default, matrix, moved, 0, -2, -1)


def powers(shift: Any, squarings: int, scaled: bool = False) -> fx.Graph:
    """(X X^T + shift I), or that times a 0-d tensor, to a power, times X."""
    b = Builder(x=empty((31, 48), torch.float16), t=3.0, **({"s": empty(())} if scaled else {}))
    turned = b.call("turned", aten.permute.default, b["x"], [1, 0])
    r = shifts(b, b.call("gram", aten.mm.default, b["x"], turned), b["t"] if shift == "t" else shift, "shifted")
    r = b.call("scaled", aten.mul.Tensor, r, b["s"]) if scaled else r
    for i in range(squarings):
        r = b.call(f"square_{i}", aten.mm.default, r, r)
    return b.returns(b.call("last", aten.mm.default, r, b["x"]))


@pytest.mark.parametrize(("squarings", "pads"), [(1, 1), (3, 1), (4, 2)])
def test_a_corner_that_would_overflow_is_not_computed(squarings: int, pads: int) -> None:
    """3^2 and 3^8 are numbers of float16, 3^16 is none: that product gets the matrix without its padding."""
    graph = powers(3.0, squarings)
    after = padded(graph)
    assert calls(after).count(PAD_CAST) == pads
    x = torch.randn(31, 48, generator=torch.Generator().manual_seed(0)) * 1e-3
    (found,) = evaluate(after, {"x": x.half(), "t": 3.0})
    if squarings < 4:
        assert torch.isfinite(found).all()
    big = x.double()
    r = big @ big.T + 3.0 * torch.eye(31, dtype=torch.float64)
    for _ in range(squarings):
        r = r @ r
    assert close(evaluate(in_float64(after), {"x": big, "t": 3.0}), [r @ big], 1e-10)


@pytest.mark.parametrize(("graph", "unknown"), [(powers("t", 1), "shifted"), (powers(3.0, 1, scaled=True), "scaled")])
def test_a_corner_that_is_not_known_is_not_computed(graph: fx.Graph, unknown: str) -> None:
    (found,) = (n for n in padded(graph).nodes if n.name == unknown)
    assert tuple(found.meta["val"].shape) == (31, 31)


@pytest.mark.full
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(algebra(31, 47, BF16), st.integers(0, 3))
def test_any_algebra(graph: fx.Graph, seed: int) -> None:
    after = padded(rewritten(graph, ("s",)))
    shapes = [n.meta["val"].shape for n in graph.nodes if n.op == "output" for n in n.args[0]]
    given_values = values(seed, **shapes_of(31, 47))
    found, expected = (evaluate(in_float64(on_cpu(g)), given_values) for g in (after, graph))
    assert [tuple(f.shape) for f in found] == [tuple(s) for s in shapes]
    assert close(found, expected)
    assert all(isinstance(f, Tensor) and torch.isfinite(f).all() for f in found)
