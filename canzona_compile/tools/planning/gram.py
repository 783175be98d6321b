"""Gram-distributed iterations: fragments are multiplied where they lie, the owner iterates on m x m alone.

For a tall or wide matrix, m <= n, cut along n, every rank multiplies its fragment into a partial m x m Gram matrix. The
owner adds them up, iterates on m x m, and sends one m x m factor back, by which every rank multiplies its fragment. So
one matrix is the work of many ranks. Newton-Schulz on Gram matrices with one restart is stable in float16 (Dao AI Lab,
gram-newton-schulz), so there are two such rounds. Bits change, so it needs numerics="fast". It is planned and
simulated, and not executed yet.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from canzona_compile.analysis.newton_schulz import chains
from canzona_compile.ir.hardware import Hardware
from canzona_compile.ir.layout import Layout
from canzona_compile.ir.step import Placed

GRAM, BATCH_SPLIT = "gram", "batch-split"
ROUNDS = 2  # one restart
PARTIAL_BYTES = 4  # of an element of a partial Gram matrix: sums of many products need 32 bits
FACTOR_BYTES = 2  # of an element of the factor


@dataclass(frozen=True, slots=True)
class Gram:
    """What one matrix asks for in each of ROUNDS rounds.

    Attributes:
        m, n: its dims, m <= n.
        fragment: seconds in which a rank multiplies its fragment into a Gram matrix, and again by the factor.
        owner: seconds of the iteration on m x m.
        up, down: bytes of a triangle of one partial Gram matrix and of one factor.
        fragment_flops, owner_flops: the same in FLOPs.
    """

    m: int
    n: int
    fragment: float
    owner: float
    up: int
    down: int
    fragment_flops: int
    owner_flops: int


def gram_of(placed: Placed, layout: Layout, hardware: Hardware) -> Gram | None:
    """The Gram form of a matrix on a layout.

    None where its compute graph is no chain of products X <- p(X X^T) X, or where the matrix is cut along its short
    dim, so that Gram matrices of fragments do not add up to that of the whole.
    """
    shape = placed.template.shape
    steps = max((len(chain.steps) for chain in chains(placed.template.graph)), default=0) if len(shape) == 2 else 0
    short = 0 if shape[0] <= shape[-1] else 1
    if steps < ROUNDS or any(box.numel and box.size[short] != shape[short] for box in layout.boxes):
        return None
    m, n = sorted(shape)
    length = max(box.size[1 - short] for box in layout.boxes)
    fragment = 2 * m * m * length
    triangle = m * (m + 1) // 2  # of a Gram matrix, and of a factor, which is a polynomial of one: both are symmetric
    # A step of the iteration on m x m is 4 products, 8 m^3; the first and the last step of a round need 6 m^3 less.
    owner = round((8 * steps / ROUNDS - 6) * m**3)
    return Gram(
        m,
        n,
        fragment / hardware.product_rate("float16", (m * m * max(1, length)) ** (1 / 3)),
        owner / hardware.product_rate("float16", m),
        PARTIAL_BYTES * triangle,
        FACTOR_BYTES * triangle,
        fragment,
        owner,
    )


def flops_by_rank(forms: Sequence[tuple[Gram, Layout, tuple[int, int]]]) -> dict[int, int]:
    """FLOPs of each rank, for matrices with their layout and owner."""
    found: dict[int, int] = {}
    for form, layout, (r, s) in forms:
        row = layout.grid.ranks[r]
        for column, rank in enumerate(row):
            share = layout.boxes[column].numel / max(1, math.prod(layout.shape))
            own = ROUNDS * (round(4 * form.m * form.m * form.n * share) + (form.owner_flops if column == s else 0))
            found[rank] = found.get(rank, 0) + own
    return found
