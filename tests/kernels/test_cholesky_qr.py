"""QR decompositions by Cholesky factors against Householder's in float64: orthogonal, exact, finite, whatever comes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from canzona_compile.kernels.cholesky_qr import cholesky_qr, noise, reference
from canzona_compile.kernels.root_ops import CHOLESKY_QR
from tests.harness.untimed import untimed
from tests.kernels.factorization_cases import deficient, errors, orthogonal, with_condition

SHAPES = [(8, 8), (64, 64), (256, 256), (300, 100), (40, 1)]


def is_triangular(r: Tensor) -> bool:
    return torch.equal(r, r.triu()) and bool((r.diagonal(dim1=-2, dim2=-1) >= 0.0).all())


RESIDUALS = {1e0: 2e-6, 1e2: 2e-6, 1e4: 2e-6, 1e6: 2e-5, 1e8: 4e-5, 1e12: 4e-5}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("condition", RESIDUALS)
def test_errors_are_those_of_the_documentation(shape: tuple[int, int], condition: float) -> None:
    matrix = with_condition(*shape, condition)
    q, r = cholesky_qr(matrix)
    apart, residual = errors(matrix, q, r)
    assert apart <= 1e-6
    assert residual <= RESIDUALS[condition]
    assert is_triangular(r)


@pytest.mark.parametrize("shape", [(8, 8), (64, 64), (100, 30)])
def test_it_is_householders_up_to_signs(shape: tuple[int, int]) -> None:
    matrix = with_condition(*shape, 1e2)
    for found, expected in zip(cholesky_qr(matrix), reference(matrix), strict=True):
        assert float((found - expected).abs().max()) <= 1e-4 * float(expected.abs().max())
    signs = torch.linalg.qr(matrix).R.diagonal(dim1=-2, dim2=-1).sign()
    assert (signs < 0).any()  # torch's own has both signs, which is why they are made equal before comparing


@pytest.mark.parametrize("condition", [1e2, 1e6, 1e12])
def test_power_iteration_is_well_conditioned_however_the_statistics_are(condition: float) -> None:
    """SOAP's product: S V with V about the eigenvectors of S. Columns differ in length, not in angle."""
    vectors = orthogonal(128, 128, 3)
    eigenvalues = torch.logspace(0.0, -math.log10(condition), 128, dtype=torch.float64)
    near = torch.linalg.qr(vectors + 1e-3 / 128**0.5 * orthogonal(128, 128, 4)).Q
    product = ((vectors * eigenvalues @ vectors.mT).float() @ near.float()).contiguous()
    apart, residual = errors(product, *cholesky_qr(product))
    assert apart <= 1e-6
    assert residual <= 2e-5


@pytest.mark.parametrize("shape", [(8, 8), (64, 64), (100, 30)])
@pytest.mark.parametrize("kind", ["rank", "dead rows", "dead columns", "equal columns", "zeros", "ones"])
def test_dependent_columns_are_completed(kind: str, shape: tuple[int, int]) -> None:
    matrix = deficient(kind, *shape)
    q, r = cholesky_qr(matrix)
    apart, residual = errors(matrix, q, r)
    assert apart <= 1e-6
    assert residual <= 4e-5
    assert is_triangular(r)


@untimed(40)
@given(
    st.integers(1, 24), st.integers(0, 12), st.lists(st.floats(-9.0, 0.0), min_size=24, max_size=24), st.integers(0, 9)
)
def test_any_singular_values(n: int, more: int, exponents: list[float], seed: int) -> None:
    singular = torch.tensor([10.0**e for e in exponents[:n]], dtype=torch.float64)
    matrix = (orthogonal(n + more, n, seed) * singular @ orthogonal(n, n, seed + 1).mT).float()
    q, r = cholesky_qr(matrix)
    apart, residual = errors(matrix, q, r)
    assert apart <= 1e-6
    assert residual <= 4e-5


@untimed(40)
@given(st.lists(st.floats(-30.0, 30.0), min_size=12, max_size=12), st.integers(0, 9))
def test_lengths_of_columns_make_no_difference(exponents: list[float], seed: int) -> None:
    """Q is that of columns of length 1; each column of R is exact to its own length."""
    matrix = with_condition(20, 12, 1e1, seed)
    lengths = torch.tensor([10.0**e for e in exponents], dtype=torch.float64)
    q, r = cholesky_qr((matrix * lengths).float())
    plain, _ = cholesky_qr(matrix)
    assert float((q - plain).abs().max()) <= 1e-5
    assert errors(matrix, q, (r.double() / lengths))[1] <= 1e-5


def test_a_batch_is_decomposed_matrix_by_matrix() -> None:
    """Also where some entries need the longer way and others do not."""
    kinds = ["rank", "ones", "dead rows", "zeros"]
    matrices = torch.cat([with_condition(24, 24, 10.0), *(deficient(kind, 24, 24) for kind in kinds)])
    q, r = cholesky_qr(matrices)
    for i, matrix in enumerate(matrices):
        alone, _ = cholesky_qr(matrix)
        assert errors(matrix, q[i], r[i])[0] <= 1e-6
        if i < 2:
            assert float((q[i] - alone).abs().max()) <= 1e-5
    nested, _ = cholesky_qr(matrices.reshape(2, 5, 24, 24))
    assert torch.equal(nested.flatten(0, 1)[:2], q[:2])
    assert cholesky_qr(matrices.mT[:2])[0].shape == (2, 24, 24)
    assert [t.shape for t in cholesky_qr(matrices[:0])] == [(0, 24, 24)] * 2


def test_noise_is_the_same_every_time_and_has_full_rank() -> None:
    made = noise(torch.zeros(3, 128, 96))
    assert torch.equal(made, noise(torch.zeros(128, 96)))
    assert float(made.norm(dim=0).mean()) == pytest.approx(1.0, abs=0.05)
    assert float(torch.linalg.svdvals(made[:48, :48]).min()) > 1e-4


def test_what_is_refused() -> None:
    with pytest.raises(TypeError, match="float64"):
        cholesky_qr(torch.eye(4, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"\[3, 4\]"):
        cholesky_qr(torch.ones(3, 4))


def test_the_operator_is_sound() -> None:
    matrix = with_condition(9, 6, 1e1)
    torch.library.opcheck(CHOLESKY_QR, (matrix,), test_utils=("test_schema", "test_faketensor"))
    for found, expected in zip(CHOLESKY_QR(matrix), cholesky_qr(matrix), strict=True):
        assert torch.equal(found, expected)
