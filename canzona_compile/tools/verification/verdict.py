"""Whether an optimizer that is distributed already takes the plain one's steps: by bits, by rounding, or not."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from canzona_compile.errors import some
from canzona_compile.report.page import Block, PageTable, note
from canzona_compile.report.units import format_quantity, plural

VerdictName = Literal["equal bits", "different bits", "equal to rounding", "another algorithm", "error", "hang"]

# In units of what a perturbed gradient does. The same in another order did up to 6 times as much, for Muon in bfloat16
# on a matrix of one row, and up to 3 times for larger ones, SOAP, Shampoo and AdamW, and in float64.
FACTOR = 8.0
FLOOR = 1e-9  # of the way that a parameter has moved: no algorithm differs by so little
LARGE = 0.05  # of that way: where rounding may do so much, a comparison tells little


@dataclass(frozen=True, slots=True)
class Gap:
    """How far the distributed optimizer's parameter is from the plain one's after a step.

    Distances are norms, relative to how far the plain optimizer has moved the parameter since the start.

    Attributes:
        precision: the coarsest floats in which the plain step computes, as in "bfloat16".
        apart: the distance.
        rounding: what rounding may do: the distance of a plain run with each gradient changed by one unit in the last
            place of `precision`, or one unit in the last place of the parameter, if that is more.
        beyond: whether the distance is more than rounding explains, 8 times `rounding`.
    """

    parameter: str
    step: int
    precision: str
    apart: float
    rounding: float
    beyond: bool

    @classmethod
    def of(cls, parameter: str, step: int, precision: str, apart: float, rounding: float, moved: float) -> Gap:
        """Make one from three norms."""
        far, near = ((norm / moved if moved else math.inf) if norm else 0.0 for norm in (apart, rounding))
        return cls(parameter, step, precision, far, near, apart > max(FACTOR * rounding, FLOOR * moved))


@dataclass(frozen=True, slots=True)
class AsIs:
    """What was found of an optimizer that is distributed already.

    Attributes:
        gaps: the distance that decides, as both run and with floats of 64 bits: the first one that rounding does not
            explain, or the largest one. Empty if bits are equal.
        unclear: parameters for which rounding alone may do so much that the comparison tells little.
        coarser: whether it rounds more coarsely than the plain optimizer, though the algorithm is the same.
        undecided: why the steps could not be repeated with floats of 64 bits; empty if they were, or need not be.
        error: what was raised, or which ranks hang; empty otherwise.
        bytes_sent: per step after the first, of the rank that sends most.
        collectives: how many of each kind a rank calls per step after the first.
    """

    verdict: VerdictName
    gaps: tuple[Gap, ...] = ()
    unclear: tuple[str, ...] = ()
    coarser: bool = False
    undecided: str = ""
    error: str = ""
    bytes_sent: float = 0.0
    collectives: Mapping[str, float] = field(default_factory=dict)


def judged(first: Sequence[Gap], double: Sequence[Gap]) -> AsIs:
    """Tell rounding from another algorithm.

    Rounding all but vanishes with floats of 64 bits, and another algorithm stays as far away as it was.

    Args:
        first: all distances of both as they run.
        double: the same with floats of 64 bits; empty if they could not run so.
    """
    deciding = double or first
    if beyond := [gap for gap in deciding if gap.beyond]:
        worst = max((gap for gap in beyond if gap.step == beyond[0].step), key=lambda gap: gap.apart)
        place = worst.parameter, worst.step
        return AsIs("another algorithm", tuple(g for g in (*first, *double) if (g.parameter, g.step) == place))
    return AsIs(
        "equal to rounding",
        tuple(max(own, key=lambda gap: gap.apart) for own in (first, double) if own),
        tuple(dict.fromkeys(g.parameter for g in deciding if g.apart and FACTOR * g.rounding > LARGE)),
        coarser=bool(double) and any(gap.beyond for gap in first),
    )


def verdict_parts(found: AsIs) -> Iterator[Block]:
    """What a page says of it, below the verdict."""
    if found.error:
        yield note(found.error, "red", indent=2)
    if found.gaps:
        headers = ("computed in", "parameter:~", "after step:>", "difference:>", "rounding:>")
        rows = [
            (gap.precision, gap.parameter, str(gap.step), f"{gap.apart:.1e}", f"{gap.rounding:.1e}")
            for gap in found.gaps
        ]
        yield PageTable(headers, tuple(rows), "Distance, of the way that the parameter has moved", indent=2)
        yield note("rounding: what one unit in the last place of each gradient does to the plain optimizer", "dim", 2)
    if found.coarser:
        yield note("The algorithm is the same, but it rounds more coarsely than the plain optimizer.")
    if found.undecided:
        yield note(f"The steps could not be repeated in float64, where rounding vanishes: {found.undecided}.")
    if found.unclear:
        alone = f"Rounding alone moves {plural(len(found.unclear), 'parameter')} by {LARGE:.0%} or more, so this tells"
        yield note(f"{alone} little of {some(found.unclear)}.")
    if found.gaps:
        yield note("")
    if found.collectives:
        calls = ", ".join(f"{count:.3g} {name}" for name, count in found.collectives.items())
        yield note(f"per step: {calls}; {format_quantity(found.bytes_sent, 'B')} sent by the rank that sends most")
