"""Find from its coefficients when an iteration on a Gram matrix has to begin anew.

The iteration keeps R = X X^T and Q, the product of the polynomials so far. Rounding shifts the eigenvalues of R by
about half an ulp of the largest one, so eigenvalues near zero become negative. A step multiplies R by p(R)^2. The
polynomials are not designed for negative eigenvalues, so these grow from step to step, and then Q becomes too large as
well. A restart forms the Gram matrix of Q X, whose eigenvalues are positive again. (Dao AI Lab, "Gram Newton-Schulz",
finds restarts by the same simulation of eigenvalues.)
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from canzona_compile.analysis.newton_schulz import Polynomial

Floats = NDArray[np.float64]

LIMIT = 1.3  # the largest growth to accept; see `growth`
GRID = 4096  # the number of values to simulate


@cache
def plan_restarts(
    polynomials: tuple[Polynomial, ...], roundoff: float, bound: float, largest: float
) -> tuple[int, ...] | None:
    """Find after which steps to form a new Gram matrix.

    The plan has as few restarts as keep growth within `LIMIT`. Among such plans it has the earliest restarts. At least
    two steps run on each Gram matrix, because a single step would be no less work than on X.

    Args:
        polynomials: the coefficients of each step.
        roundoff: half an ulp of 1 in the dtype of the iteration.
        bound: an upper bound of the singular values at the start.
        largest: the largest number of that dtype.

    Returns:
        The number of steps before each restart, in ascending order. None if no plan keeps growth within `LIMIT` and
        all numbers below `largest`.
    """
    count = len(polynomials)
    values = singular_values(polynomials, bound)
    if not all(float(np.square(v.max())) < largest for v in values):
        return None

    @cache
    def fits(first: int, last: int) -> bool:
        """Whether the steps from `first` up to `last` may run on one Gram matrix."""
        top = float(np.square(values[first].max()))
        return last - first > 1 and growth(polynomials[first:last], top, roundoff, largest) <= LIMIT

    @cache
    def earliest(first: int, segments: int) -> tuple[int, ...] | None:
        """The earliest restarts that divide the steps from `first` on into so many segments; None if there are none."""
        if segments == 1:
            return () if fits(first, count) else None
        for cut in range(first + 2, count - 1):
            if fits(first, cut) and (rest := earliest(cut, segments - 1)) is not None:
                return cut, *rest
        return None

    plans = (earliest(0, segments) for segments in range(1, count // 2 + 1))
    return next((plan for plan in plans if plan is not None), None)


def singular_values(polynomials: Sequence[Polynomial], bound: float) -> list[Floats]:
    """Simulate the singular values from 0 to `bound`.

    Returns:
        The values before the first step, and after each step: [GRID] each.
    """
    found = [np.linspace(0.0, bound, GRID)]
    with np.errstate(over="ignore", invalid="ignore"):
        for p in polynomials:
            found.append(np.abs(found[-1] * polynomial_at(found[-1] ** 2, p)))
    return found


def polynomial_at(x: Floats, polynomial: Sequence[float]) -> Floats:
    """The value p(x) for each x; infinite or NaN where it overflows."""
    result = np.zeros_like(x)
    with np.errstate(over="ignore", invalid="ignore"):
        for coefficient in reversed(polynomial):
            result = result * x + coefficient
    return result


def growth(polynomials: Sequence[Polynomial], largest_eigenvalue: float, roundoff: float, largest: float) -> float:
    """How much too large Q becomes because rounding makes eigenvalues negative.

    Args:
        polynomials: the coefficients of the steps on one Gram matrix.
        largest_eigenvalue: an upper bound of the eigenvalues of the Gram matrix.
        roundoff: half an ulp of 1 in the dtype of the iteration.
        largest: the largest number of that dtype.

    Returns:
        The largest value of Q at negative eigenvalues, divided by the largest one at exact eigenvalues. Infinite if a
        number on the way reaches `largest`.
    """
    due, terms = factors(polynomials, np.linspace(0.0, largest_eigenvalue, GRID))
    found, most = factors(polynomials, -largest_eigenvalue * roundoff * np.linspace(0.0, 1.0, 16))
    top = max(float(np.abs(due).max()), float(np.abs(found).max()), terms, most)
    if not top < largest:
        return float("inf")
    return float(np.abs(found).max() / max(float(np.abs(due).max()), 1e-300))


def factors(polynomials: Sequence[Polynomial], eigenvalues: Floats) -> tuple[Floats, float]:
    """Simulate the steps on one Gram matrix.

    Args:
        polynomials: the coefficients of each step.
        eigenvalues: those of the Gram matrix at the start.

    Returns:
        The product of the polynomials for each eigenvalue, and the largest number on the way: an eigenvalue, or the
        sum of the absolute terms of a polynomial.
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
