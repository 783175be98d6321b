"""What iterations on Gram matrices in float16 are off, on spectra that are hard for them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
import torch
from torch import Tensor, fx

from canzona_compile.kernels.ops import DIV_CAST
from canzona_compile.lowering.symmetric_products import rewritten as with_halves
from canzona_compile.passes.gram import PUBLISHED
from tests.harness.random_graphs import evaluate
from tests.passes.iterations import JORDAN, Iteration, rewrite

aten = torch.ops.aten

M, N = 64, 192


TAIL = torch.rand(M, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 1e-3
TAIL[:2] = torch.tensor([1.0, 0.5], dtype=torch.float64)
SPECTRA = {
    "log 1..1e-10": torch.logspace(0, -10, M, dtype=torch.float64),
    "log 1..1e-3": torch.logspace(0, -3, M, dtype=torch.float64),
    "rank 10": (torch.arange(M) < 10).double(),
    "rank 2 and a tail": TAIL,
}


@cache
def matrix(name: str) -> Tensor:
    """A matrix of this spectrum, in bfloat16: what the iteration is given."""
    random = torch.Generator().manual_seed(1)
    left, right = (torch.linalg.qr(torch.randn(k, M, dtype=torch.float64, generator=random)).Q for k in (M, N))
    return (left * SPECTRA[name] @ right.T).bfloat16()


def exactly(x: Tensor, polynomials: Sequence[Sequence[float]]) -> Tensor:
    """In float64."""
    x = x.double() / x.double().norm()
    for a, b, c in polynomials:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


@cache
def graphs(name: str, tall: bool) -> tuple[fx.Graph, fx.Graph]:
    graph = Iteration(M, N, torch.bfloat16, tall).iterated(PUBLISHED[name])
    new = rewrite(graph)
    assert new is not graph
    return graph, new


def error(graph: fx.Graph, x: Tensor, expected: Tensor, tall: bool) -> tuple[float, float]:
    """Relative, in the Frobenius norm, and what the largest singular value has too much."""
    (found,) = evaluate(graph, {"x": x.mT.contiguous() if tall else x, "c": 0.5})
    assert found.dtype == torch.bfloat16
    found = found.double().mT if tall else found.double()
    top = torch.linalg.matrix_norm(found, 2) - torch.linalg.matrix_norm(expected, 2)
    return float((found - expected).norm() / expected.norm()), float(top)


@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize("name", PUBLISHED)
def test_errors_on_hard_spectra(name: str, spectrum: str) -> None:
    x = matrix(spectrum)
    expected = exactly(x, PUBLISHED[name])
    graph, new = graphs(name, False)
    before, _ = error(graph, x, expected, False)
    for faster in (new, with_halves(new)):
        relative, top = error(faster, x, expected, False)
        assert relative <= 0.1
        assert relative <= before
        assert top <= 0.06


@pytest.mark.parametrize("tall", [False, True])
@pytest.mark.parametrize("size", [1e-20, 1e-6, 1e6, 1e15])
def test_sizes_that_float16_does_not_have(size: float, tall: bool) -> None:
    x = matrix("log 1..1e-3") * size
    expected = exactly(x, JORDAN)
    if size == 1e-20:  # below the least norm, as in the original
        expected = expected * 0
        (found,) = evaluate(graphs("Jordan", tall)[1], {"x": x.mT.contiguous() if tall else x, "c": 0.5})
        assert float(found.abs().max()) < 1e-3
    else:
        relative, top = error(graphs("Jordan", tall)[1], x, expected, tall)
        assert relative <= 0.1
        assert top <= 0.06


def test_zeros_stay_zeros() -> None:
    (found,) = evaluate(graphs("Jordan", False)[1], {"x": torch.zeros(M, N, dtype=torch.bfloat16), "c": 0.5})
    assert torch.equal(found, torch.zeros_like(found))


def test_only_sixteen_bits_become_float16() -> None:
    graph = rewrite(Iteration(4, 40, torch.float32).iterated(JORDAN))
    dtypes = {n.meta["val"].dtype for n in graph.nodes if isinstance(n.meta.get("val"), Tensor)}
    assert dtypes == {torch.float32}
    wide = {
        n.target: n.meta["val"].dtype for n in graphs("Jordan", False)[1].nodes if isinstance(n.meta.get("val"), Tensor)
    }
    assert (wide[aten.linalg_vector_norm.default], wide[DIV_CAST]) == (torch.float32, torch.float16)
    assert wide[aten.mm.default] == torch.float16
