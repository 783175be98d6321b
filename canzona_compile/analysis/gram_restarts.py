"""Finds from the coefficients of an iteration on a Gram matrix when it has to begin anew.

Rounding shifts the eigenvalues of R = X X^T by about half an ulp of the largest one, so eigenvalues near zero become
negative. The polynomials do not damp those: a step multiplies R by p^2, so a negative eigenvalue grows until p, which
nobody designed for it, blows up Q as well. A new Gram matrix, of Q X, begins with positive eigenvalues. (Dao AI Lab,
"Gram Newton-Schulz", finds restarts by the same simulation of eigenvalues.)
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from canzona_compile.analysis.newton_schulz import Polynomial

Floats = NDArray[np.float64]

LIMIT = 1.3  # the factor of a vanishing singular value may be so many times its exact value
GRID = 4096  # number of singular values that are simulated


@cache
def plan_restarts(
    polynomials: tuple[Polynomial, ...], roundoff: float, bound: float, largest: float
) -> tuple[int, ...] | None:
    """Find after which steps to form a new Gram matrix: as few times as keep growth below LIMIT, and then as early.

    Between two restarts are at least two steps, as one step alone is no less work on a Gram matrix.

    Args:
        polynomials: the coefficients of each step.
        roundoff: half an ulp of 1 in the dtype of the iteration.
        bound: no singular value is larger than this at the start.
        largest: the largest number of that dtype; an iteration that comes near it has no plan.

    Returns:
        Positions in ascending order, each above 0 and below the number of steps; None where there is no such plan.
    """
    count = len(polynomials)
    values = singular_values(polynomials, bound)
    if not all(float(np.square(v.max())) < largest for v in values):
        return None

    @cache
    def fits(first: int, last: int) -> bool:
        top = float(np.square(values[first].max()))
        return last - first > 1 and growth(polynomials[first:last], top, roundoff, largest) <= LIMIT

    @cache
    def earliest(first: int, segments: int) -> tuple[int, ...] | None:
        if segments == 1:
            return () if fits(first, count) else None
        for cut in range(first + 2, count - 1):
            if fits(first, cut) and (rest := earliest(cut, segments - 1)) is not None:
                return cut, *rest
        return None

    plans = (earliest(0, segments) for segments in range(1, count // 2 + 1))
    return next((plan for plan in plans if plan is not None), None)


def singular_values(polynomials: Sequence[Polynomial], bound: float) -> list[Floats]:
    """Singular values from 0 to `bound`, before the first step and after each."""
    found = [np.linspace(0.0, bound, GRID)]
    with np.errstate(over="ignore", invalid="ignore"):
        for p in polynomials:
            found.append(np.abs(found[-1] * polynomial_at(found[-1] ** 2, p)))
    return found


def polynomial_at(x: Floats, polynomial: Sequence[float]) -> Floats:
    """p(x), which is infinite or NaN where it overflows."""
    result = np.zeros_like(x)
    with np.errstate(over="ignore", invalid="ignore"):
        for coefficient in reversed(polynomial):
            result = result * x + coefficient
    return result


def growth(polynomials: Sequence[Polynomial], largest_eigenvalue: float, roundoff: float, largest: float) -> float:
    """The factor by which negative eigenvalues from rounding make the product of the polynomials too large."""
    due, terms = factors(polynomials, np.linspace(0.0, largest_eigenvalue, GRID))
    found, most = factors(polynomials, -largest_eigenvalue * roundoff * np.linspace(0.0, 1.0, 16))
    top = max(float(np.abs(due).max()), float(np.abs(found).max()), terms, most)
    if not top < largest:
        return float("inf")
    return float(np.abs(found).max() / max(float(np.abs(due).max()), 1e-300))


def factors(polynomials: Sequence[Polynomial], eigenvalues: Floats) -> tuple[Floats, float]:
    """The product of the polynomials by eigenvalue at the start, and the largest number on the way.

    That is an eigenvalue, or a polynomial's terms, which may be larger than their sum.
    """
    q, r, most = np.ones_like(eigenvalues), eigenvalues, float(np.abs(eigenvalues).max())
    with np.errstate(over="ignore", invalid="ignore"):
        for i, p in enumerate(polynomials):
            factor = polynomial_at(r, p)
            most = max(most, float(polynomial_at(np.abs(r), [abs(c) for c in p]).max()))
            q = q * factor
            if i + 1 < len(polynomials):
                r = r * factor * factor
                most = max(most, float(np.abs(r).max()))
    return q, most
