"""Factorizations on a GPU, within the bounds of the CPU's tests."""

from __future__ import annotations

import pytest
import torch

from canzona_compile.kernels.cholesky_qr import cholesky_qr
from canzona_compile.kernels.inverse_root import inverse_root, reference
from tests.harness.gpu import DEVICE
from tests.harness.marks import first
from tests.kernels.factorization_cases import (
    BOUNDS,
    KINDS,
    deficient,
    error,
    errors,
    spectrum,
    with_condition,
    with_spectrum,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore"),  # drivers have their own
]


@pytest.mark.parametrize("p", first([2, 4]))
def test_roots(p: int) -> None:
    """Also where products of the caller may be rounded to TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        for kind in KINDS:
            matrix = with_spectrum(spectrum(kind, 256, 1e4))
            assert error(inverse_root(matrix.to(DEVICE), p).cpu(), reference(matrix, p)) <= BOUNDS[p][1e4]
    finally:
        torch.set_float32_matmul_precision(before)


def test_cholesky_qr() -> None:
    for kind in ("rank", "equal columns"):
        matrix = torch.cat([with_condition(64, 64, 1e2), deficient(kind, 64, 64)])
        q, r = (t.cpu() for t in cholesky_qr(matrix.to(DEVICE)))
        apart, residual = errors(matrix, q, r)
        assert apart <= 1e-6
        assert residual <= 4e-5
