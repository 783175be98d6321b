"""Inverse roots by matrix products against roots by eigenvalues in float64, over spectra, and their polynomials."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from canzona_compile.kernels.cholesky_qr import cholesky_qr
from canzona_compile.kernels.full_precision import full_precision
from canzona_compile.kernels.inverse_root import SMALLEST, inverse_root, norm_bound, products, reference
from canzona_compile.kernels.minimax import schedule
from canzona_compile.kernels.root_ops import INVERSE_ROOT
from tests.harness.marks import also
from tests.harness.untimed import untimed
from tests.kernels.factorization_cases import BOUNDS, KINDS, error, spectrum, with_spectrum

aten = torch.ops.aten


# -- polynomials -------------------------------------------------------------------------------


def composed(steps: Any, p: int, t: float) -> tuple[float, list[float]]:
    """The product of all q, and the values that t takes on the way."""
    product, way = 1.0, [t]
    for a, b, c in steps:
        q = a + b * t + c * t * t
        product, t = product * q, t * q**p
        way.append(t)
    return product, way


@untimed(150)
@given(st.sampled_from([2, 3, 4, 8, 16]), st.floats(1.5, 40.0), st.floats(0.0, 1.0))
def test_steps_take_an_interval_to_one(p: int, bits: float, place: float) -> None:
    smallest, tolerance = 2.0**-bits, 2.0**-23
    t = smallest ** (1.0 - place)
    product, way = composed(schedule(p, smallest, tolerance), p, t)
    assert abs(product * t ** (1.0 / p) - 1.0) <= 1.01 * tolerance
    assert all(0.0 < x <= 1.0 for x in way[:-1])


@pytest.mark.parametrize("p", [2, 4, 8])
def test_below_the_interval_the_root_is_capped(p: int) -> None:
    steps = schedule(p, SMALLEST, 2.0**-23)
    caps = [composed(steps, p, SMALLEST * 2.0**-k)[0] for k in range(12)]
    assert all(a <= b for a, b in pairwise(caps))
    top = composed(steps, p, 0.0)[0]
    assert caps[-1] <= top <= 16.0 * SMALLEST ** (-1.0 / p)
    assert 0.0 < composed(steps, p, -(2.0**-24))[0] < 4.0 * top  # rounding's negative numbers do no harm


@pytest.mark.parametrize(
    ("p", "smallest", "tolerance"), [(1, 0.1, 1e-3), (2, 0.0, 1e-3), (2, 1.0, 1e-3), (2, 0.1, 0.0)]
)
def test_intervals_that_are_none(p: int, smallest: float, tolerance: float) -> None:
    with pytest.raises(ValueError, match="smallest in"):
        schedule(p, smallest, tolerance)


# -- roots -------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [8, 64, *also([256])])
@pytest.mark.parametrize("p", [2, 4])
@pytest.mark.parametrize("condition", [1e0, 1e2, 1e4, 1e6])
def test_errors_are_those_of_the_documentation(p: int, condition: float, n: int) -> None:
    for kind in KINDS:
        matrix = with_spectrum(spectrum(kind, n, condition))
        assert error(inverse_root(matrix, p), reference(matrix, p)) <= BOUNDS[p][condition], kind


@pytest.mark.parametrize("p", [2, 4, 8, 16])
@pytest.mark.parametrize("condition", [1e8, 1e12, math.inf])
def test_singular_matrices_have_finite_roots(p: int, condition: float) -> None:
    for kind in KINDS:
        matrix = with_spectrum(spectrum(kind, 64, condition))
        root = inverse_root(matrix, p)
        assert root.isfinite().all(), kind
        assert float(torch.linalg.matrix_norm(root, 2).max()) <= 32.0 * SMALLEST ** (-1.0 / p), kind


EXPONENTS = st.lists(st.floats(-4.0, 0.0), min_size=1, max_size=24)


@untimed(60)
@given(EXPONENTS, st.sampled_from([2, 4, 8]), st.integers(-8, 8), st.integers(0, 9))
def test_any_spectrum_at_any_scale(exponents: list[float], p: int, scale: int, seed: int) -> None:
    eigenvalues = torch.tensor([10.0**e for e in exponents], dtype=torch.float64)
    matrix = with_spectrum(eigenvalues * 10.0**scale, seed, 1)
    condition = float(eigenvalues.max() / eigenvalues.min())
    assert error(inverse_root(matrix, p), reference(matrix, p)) <= 1e-6 + 2e-7 * condition / p


@untimed(60)
@given(EXPONENTS, st.sampled_from([2, 4]), st.floats(-3.0, 1.0), st.floats(-1.0, 1.0), st.integers(0, 9))
def test_floors_are_those_of_eigenvalues(exponents: list[float], p: int, floor: float, shift: float, seed: int) -> None:
    """Also of indefinite matrices."""
    eigenvalues = torch.tensor([10.0**e for e in exponents], dtype=torch.float64) + shift
    matrix = with_spectrum(eigenvalues, seed, 1)
    found, expected = inverse_root(matrix, p, 0.0, 10.0**floor), reference(matrix, p, 0.0, 10.0**floor)
    largest = max(1.0, float(eigenvalues.abs().max()) / 10.0**floor)
    assert error(found, expected) <= 2e-6 + 2e-6 * largest / p


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("floor", [1e-5, 1e-3, 1e-1, 1e1])
def test_a_floor_bounds_the_error(kind: str, floor: float) -> None:
    matrix = with_spectrum(spectrum(kind, 64, 1e12))
    found, expected = inverse_root(matrix, 4, 0.0, floor), reference(matrix, 4, 0.0, floor)
    assert error(found, expected) <= 2e-6 + 5e-8 / floor


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ridge", [1e-4, 1e-2, 1e0, 1e2])
def test_a_ridge_is_added(kind: str, ridge: float) -> None:
    matrix = with_spectrum(spectrum(kind, 64, 1e10))
    assert error(inverse_root(matrix, 4, ridge), reference(matrix, 4, ridge)) <= 2e-6 + 2e-8 / ridge
    both = inverse_root(matrix, 2, ridge, 2 * ridge), reference(matrix, 2, ridge, 2 * ridge)
    assert error(*both) <= 2e-6 + 5e-8 / ridge


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1.0, 1e12, 1e30])
def test_scale_makes_no_difference(scale: float) -> None:
    matrix = with_spectrum(spectrum("even", 32, 1e3))
    found = inverse_root(matrix * scale, 4) * scale**0.25
    assert error(found, reference(matrix, 4)) <= 2e-5
    assert inverse_root(torch.zeros(2, 5, 5), 4).isfinite().all()


def test_only_the_lower_triangle_is_read() -> None:
    matrix = with_spectrum(spectrum("even", 16, 1e2))
    nonsense = matrix + torch.full_like(matrix, torch.nan).triu(1)
    assert torch.equal(inverse_root(nonsense, 4), inverse_root(matrix, 4))


def test_shapes_and_strides() -> None:
    matrix = with_spectrum(spectrum("even", 12, 1e2), count=6)
    expected = inverse_root(matrix, 4)
    assert error(inverse_root(matrix.mT, 4), expected) < 1e-5
    assert error(inverse_root(matrix.reshape(2, 3, 12, 12), 4).flatten(0, 1), expected) < 1e-5
    assert error(inverse_root(matrix[1], 4)[None], expected[1:2]) < 1e-5
    assert error(inverse_root(matrix[:1].expand(4, -1, -1), 4), expected[:1].expand(4, -1, -1)) < 1e-5
    assert inverse_root(matrix[:0], 4).shape == (0, 12, 12)
    assert inverse_root(torch.full((1, 1), 16.0), 4).item() == pytest.approx(0.5)


@untimed(40)
@given(EXPONENTS, st.integers(0, 9))
def test_the_bound_is_one_and_tight(exponents: list[float], seed: int) -> None:
    eigenvalues = torch.tensor([10.0**e for e in exponents], dtype=torch.float64)
    largest, bound = float(eigenvalues.max()), float(norm_bound(with_spectrum(eigenvalues, seed, 1)))
    assert largest <= bound <= 1.01 * largest * len(exponents) ** 0.125


def test_what_is_refused() -> None:
    square = torch.eye(4)
    with pytest.raises(TypeError, match="float64"):
        inverse_root(square.double(), 4)
    with pytest.raises(ValueError, match=r"\[4, 3\]"):
        inverse_root(square[:, :3], 4)
    for p in (0, 1, 3, 32):
        with pytest.raises(ValueError, match="power of two"):
            inverse_root(square, p)
    with pytest.raises(ValueError, match="floor"):
        inverse_root(square, 4, 0.0, 0.0)


# -- as work of a GPU --------------------------------------------------------------------------


class Calls(TorchDispatchMode):
    """Counts operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@contextmanager
def counted() -> Iterator[list[str]]:
    with Calls() as calls:
        yield calls.names


HOST = {"_local_scalar_dense", "is_nonzero", "equal", "nonzero", "_to_copy", "item"}


@pytest.mark.parametrize("floor", [None, 1e-3])
@pytest.mark.parametrize("p", [2, 4, 8, 16])
def test_products_are_those_that_are_counted_and_the_host_waits_for_none(p: int, floor: float | None) -> None:
    matrix = with_spectrum(spectrum("even", 8, 1e2))
    with counted() as names:
        inverse_root(matrix, p, 1e-3, floor)
    assert names.count("bmm") == products(p, floor is not None)
    assert not HOST & set(names)


def test_the_host_waits_for_no_qr_either() -> None:
    with counted() as names:
        cholesky_qr(torch.randn(2, 8, 8))
    assert not (HOST - {"_to_copy"}) & set(names)  # integers to floats, on the device


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_products_take_all_bits_and_what_was_set_is_set_again(precision: str) -> None:
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(precision)
        with full_precision():
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_float32_matmul_precision() == precision
        with pytest.raises(ZeroDivisionError), full_precision():
            _ = 1 / 0
        assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision(before)


def test_products_take_all_bits_where_the_new_switches_are_in_use() -> None:
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = "tf32"
        with full_precision():
            assert matmul.fp32_precision == "ieee"
        assert matmul.fp32_precision == "tf32"
    finally:
        matmul.fp32_precision = before


@pytest.mark.parametrize("floor", [None, 0.5])
def test_the_operator_is_sound(floor: float | None) -> None:
    matrix = with_spectrum(spectrum("even", 6, 1e2))
    torch.library.opcheck(INVERSE_ROOT, (matrix, 4, 0.25, floor), test_utils=("test_schema", "test_faketensor"))
    assert torch.equal(INVERSE_ROOT(matrix, 4, 0.25, floor), inverse_root(matrix, 4, 0.25, floor))
