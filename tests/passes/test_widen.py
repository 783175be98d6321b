"""Products of bfloat16 matrices on CPUs without instructions for them."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch.nn import Parameter
from torch.optim import Muon

import canzona_compile
from canzona_compile.analysis.flops import LIBRARY_PRODUCTS
from canzona_compile.ir.fx_utils import tensor_value
from canzona_compile.machine.hardware import Machine
from canzona_compile.passes import Widening
from canzona_compile.passes.gram import PUBLISHED
from canzona_compile.passes.widen import widened
from tests.harness.random_graphs import evaluate
from tests.passes.iterations import Iteration
from tests.passes.symmetric_graphs import muon_history
from tests.passes.test_gram_errors import SPECTRA, M, N, exactly, matrix


@pytest.mark.parametrize("spectrum", SPECTRA)
def test_errors_are_those_of_bfloat16(spectrum: str) -> None:
    """Against float64: what rounding to bfloat16 after each product costs, in whatever order a sum is."""
    graph = Iteration(M, N, torch.bfloat16, False).iterated(PUBLISHED["Jordan"])
    wide = widened(graph)
    assert {tensor_value(n).dtype for n in wide.nodes if n.target in LIBRARY_PRODUCTS} == {torch.float32}  # type: ignore[union-attr]
    expected = exactly(matrix(spectrum), PUBLISHED["Jordan"])
    errors = []
    for own in (graph, wide):
        (found,) = evaluate(own, {"x": matrix(spectrum), "c": 0.5})
        assert found.dtype == torch.bfloat16
        errors.append(float((found.double() - expected).norm() / expected.norm()))
    assert errors[1] <= 1.2 * errors[0]


@pytest.mark.parametrize(("capability", "device", "changes"), [
    ("AVX2", "cpu", True),
    ("AVX512", "cpu", False),
    ("AVX2", "cuda", False),
])  # fmt: skip
def test_where_it_runs(capability: str, device: str, changes: bool) -> None:
    step = replace(muon_history("exact", (16, 8)).step_at("padding"), machine=Machine(device, "gloo", 1))
    with mock.patch.object(torch.backends.cpu, "get_cpu_capability", return_value=capability):
        assert (Widening()(step) is not step) == changes


def test_a_step_of_muon() -> None:
    random = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=random) for shape in ((16, 24), (16, 24), (32, 8))]
    plain, ours = ([Parameter(value.clone()) for value in values] for _ in range(2))
    optimizers = Muon(plain, lr=0.02), canzona_compile.wrap(Muon(ours, lr=0.02), numerics="fast")
    with mock.patch.object(torch.backends.cpu, "get_cpu_capability", return_value="AVX2"):
        for _ in range(3):
            for a, b in zip(plain, ours, strict=True):
                a.grad = b.grad = torch.randn(a.shape, generator=random)
            for optimizer in optimizers:
                optimizer.step()
    for a, b, value in zip(plain, ours, values, strict=True):
        assert float((a - b).detach().norm()) <= 2e-2 * float((a - value).detach().norm())
