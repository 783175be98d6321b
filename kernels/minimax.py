"""Finds polynomials whose composition is t^(-1/p), by equioscillation: a root with the fewest matrix products."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

Coefficients = tuple[float, float, float]

ROUNDS = 60  # of Remez' exchange at most; it settles in about ten
SETTLED = 1e-13
MARGIN = 2.0**-9  # a step stays this far below 1, so that rounding errors above 1 do not grow from step to step
CUSHION = 0.01  # steps are best from here on: one that is best for smaller t makes large t tiny and loses digits
NARROW = 1e-3  # relative width of an interval on which the exchange is ill-conditioned and Taylor's polynomial as good


@cache
def schedule(p: int, smallest: float, tolerance: float) -> tuple[Coefficients, ...]:
    """Find steps that take every t in [`smallest`, 1] to 1.

    Step k replaces t by t q_k(t)^p with q_k(t) = a + b t + c t^2; the product of all q_k is then t^(-1/p). Each q_k is
    the best for the interval that its predecessors leave, or for [CUSHION, 1] while they leave more: its
    max |1 - t^(1/p) q(t)| is least. With p = 2 and t = x^2 it is the odd quintic of Polar Express (Amsel et al.,
    arXiv 2505.16932), whose composition is sign(x); the same argument holds for every p, since t^(1/p) q(t) is a
    polynomial in t^(1/p) with three free coefficients.

    Below `smallest` the product of all q_k is finite and grows monotonically to its value at 0, about
    `smallest`^(-1/p): values that rounding loses meet a soft floor instead of a pole.

    Args:
        p: the order of the root, at least 2.
        smallest: lower end of the first interval, in (0, 1).
        tolerance: relative error of the composition on the interval.

    Returns:
        (a, b, c) per step; all but the last are scaled so that no t leaves [0, 1].

    Raises:
        ValueError: an argument is out of its range.
    """
    if p < 2 or not 0.0 < smallest < 1.0 or tolerance <= 0.0:
        raise ValueError(f"p must be at least 2, smallest in (0, 1), tolerance positive: {p}, {smallest}, {tolerance}")
    steps: list[Coefficients] = []
    low = smallest
    while True:
        width = max(low, CUSHION)
        best, error = taylor(p, low) if low > 1.0 - NARROW else exchange(p, width)
        if low >= CUSHION and error <= tolerance:
            return (*steps, best)
        top = (1.0 + error) * (1.0 + MARGIN)
        a, b, c = best[0] / top, best[1] / top, best[2] / top
        steps.append((a, b, c))
        low = min(low * (a + low * (b + low * c)) ** p, ((1.0 - error) / top) ** p)


def taylor(p: int, low: float) -> tuple[Coefficients, float]:
    """Return the binomial series of t^(-1/p) at 1 up to the square, and its relative error on [low, 1]."""
    first, second = 1.0 / p, (1.0 / p) * (1.0 / p + 1.0) / 2.0
    q = (1.0 + first + second, -first - 2.0 * second, second)
    return q, abs(1.0 - low ** (1.0 / p) * (q[0] + low * (q[1] + low * q[2])))


def exchange(p: int, low: float) -> tuple[Coefficients, float]:
    """Remez' algorithm in x = t^(1/p): the extrema inside the interval are roots of a quadratic in t."""
    nodes = [low + (1.0 - low) * place for place in (0.0, 0.25, 0.75, 1.0)]
    error = 0.0
    q: Coefficients = (1.0, 0.0, 0.0)
    for _ in range(ROUNDS):
        rows = []
        for i, t in enumerate(nodes):
            x = t ** (1.0 / p)
            rows.append([x, x * t, x * t * t, (-1.0) ** i, 1.0])
        a, b, c, new = solve(rows)
        q = (a, b, c)
        if abs(abs(new) - error) <= SETTLED * abs(new):
            break
        error = abs(new)
        # d/dx (a x + b x^(p+1) + c x^(2p+1)) = a + (p+1) b t + (2p+1) c t^2
        half, lead = (p + 1) * b / 2.0, (2 * p + 1) * c
        root = max(half * half - lead * a, 0.0) ** 0.5
        nodes[1:3] = sorted(min(max(t, low), 1.0) for t in ((-half - root) / lead, (-half + root) / lead))
    return q, error


def solve(rows: Sequence[Sequence[float]]) -> list[float]:
    """Solve by Gauss' elimination, with pivots, rows [coefficients ..., right side]."""
    left = [list(row) for row in rows]
    size = len(left)
    for i in range(size):
        pivot = max(range(i, size), key=lambda r: abs(left[r][i]))
        left[i], left[pivot] = left[pivot], left[i]
        for r in range(size):
            if r != i:
                factor = left[r][i] / left[i][i]
                left[r] = [x - factor * y for x, y in zip(left[r], left[i], strict=True)]
    return [left[i][-1] / left[i][i] for i in range(size)]
