"""When an iteration on a Gram matrix has to begin anew, found from its coefficients.

Rounding shifts the eigenvalues of R = X X^T by about half an ulp of the largest, so those near zero become negative.
There the polynomials do not damp them: a step multiplies R by p^2, so a negative eigenvalue grows until p, which no one
designed for it, blows up Q as well. A new Gram matrix, of Q X, begins with positive ones. (Dao AI Lab, "Gram
Newton-Schulz", finds restarts by the same simulation of eigenvalues.)
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from canzona_compile.iterates import Polynomial

Floats = NDArray[np.float64]

LIMIT = 1.3  # times its due that the factor of a vanishing singular value may grow
GRID = 4096  # singular values that are simulated


@cache
def plan_restarts(
    polynomials: tuple[Polynomial, ...], roundoff: float, bound: float, largest: float
) -> tuple[int, ...] | None:
    """After which steps to form a new Gram matrix: as few as keep growth below LIMIT, the most harmless of those.

    Args:
        roundoff: half an ulp of 1 in the dtype of the iteration.
        bound: of the singular values at the start.
        largest: number in that dtype; None is returned where the iteration itself comes near.

    Returns:
        Positions in ascending order, each above 0 and below the number of steps.
    """
    values = singular_values(polynomials, bound)
    with np.errstate(over="ignore", invalid="ignore"):
        growths = {
            (i, j): growth(polynomials[i:j], float(values[i].max()) ** 2, roundoff, largest)
            for i in range(len(polynomials))
            for j in range(i + 1, len(polynomials) + 1)
        }
    if not all(np.isfinite(v).all() and float(abs(v).max()) ** 2 < largest for v in values):
        return None
    best: dict[int, tuple[float, tuple[int, ...]]] = {j: (growths[0, j], ()) for j in range(1, len(polynomials) + 1)}
    for _ in polynomials:
        worst, cuts = best[len(polynomials)]
        if worst <= LIMIT:
            return cuts
        better = {}
        for j in range(2, len(polynomials) + 1):
            options = ((max(best[i][0], growths[i, j]), (*best[i][1], i)) for i in range(1, j) if i in best)
            better[j] = min(options, key=lambda option: option[0], default=best[j])
        best = {1: best[1], **better}
    return None


def singular_values(polynomials: Sequence[Polynomial], bound: float) -> list[Floats]:
    """Singular values from 0 to `bound`, before the first step and after each."""
    found = [np.linspace(0.0, bound, GRID)]
    with np.errstate(over="ignore", invalid="ignore"):
        for p in polynomials:
            found.append(np.abs(found[-1] * np.polynomial.polynomial.polyval(found[-1] ** 2, p)))
    return found


def growth(polynomials: Sequence[Polynomial], largest_eigenvalue: float, roundoff: float, largest: float) -> float:
    """How much larger than due the product of the polynomials gets where rounding made eigenvalues negative."""
    due, _ = factors(polynomials, np.linspace(0.0, largest_eigenvalue, GRID))
    found, eigenvalue = factors(polynomials, -largest_eigenvalue * roundoff * np.linspace(0.0, 1.0, 16))
    top = max(float(np.abs(due).max()), float(np.abs(found).max()), eigenvalue)
    if not top < largest:
        return float("inf")
    return float(np.abs(found).max() / max(float(np.abs(due).max()), 1e-300))


def factors(polynomials: Sequence[Polynomial], eigenvalues: Floats) -> tuple[Floats, float]:
    """The product of the polynomials by eigenvalue at the start, and the largest eigenvalue on the way."""
    q, r, most = np.ones_like(eigenvalues), eigenvalues, float(np.abs(eigenvalues).max())
    for i, p in enumerate(polynomials):
        factor = np.polynomial.polynomial.polyval(r, p)
        q = q * factor
        if i + 1 < len(polynomials):
            r = r * factor**2
            most = max(most, float(np.abs(r).max()))
    return q, most
