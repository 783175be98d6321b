"""Planners, which choose the rank that computes each matrix. Any planner can replace any other.

`jobs.py` says what a planner is. `alpha` is the rule of Canzona's authors, which keeps the order of the flat buffer;
`lpt` and `lpt-swap` place jobs freely, in two stages or in one. Each class states what is proven of it, and its `bound`
gives the factor.
"""

from __future__ import annotations

from canzona_compile.errors import CanzonaError
from canzona_compile.ownership.alpha import AlphaBalanced
from canzona_compile.ownership.buffer import BUCKET
from canzona_compile.ownership.jobs import Planner
from canzona_compile.ownership.lpt import LptSwap, TwoStageLpt

NAMES = ("alpha", "lpt", "lpt-swap")


def planner_named(name: str, *, alpha: float = 1.0, bucket: int = BUCKET) -> Planner:
    """The planner of that name. It ignores options that it does not have.

    Args:
        bucket: elements at which a bucket closes, for `AlphaBalanced`.
    """
    match name:
        case "alpha":
            return AlphaBalanced(alpha, bucket)
        case "lpt":
            return TwoStageLpt()
        case "lpt-swap":
            return LptSwap()
    raise CanzonaError(
        f"there is no ownership planner {name!r}", at="the option planner", hint=f"use one of {', '.join(NAMES)}"
    )
