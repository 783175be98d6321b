"""Planners, which choose the rank that computes each matrix. Any planner can replace any other.

`jobs.py` says what a planner is. `alpha` is the rule of Canzona's authors, which keeps the order of the flat buffer;
`lpt` and `lpt-swap` place jobs freely, in two stages or in one. Each class states what is proven of it, and its `bound`
gives the factor.
"""

from __future__ import annotations

from canzona_compile.errors import CanzonaError
from canzona_compile.ownership.alpha import AlphaBalanced
from canzona_compile.ownership.jobs import Planner
from canzona_compile.ownership.lpt import LptSwap, TwoStageLpt

# All of them: options, the command line, and the alternatives that a plan shows follow this.
PLANNERS = {kind.name: kind for kind in (AlphaBalanced, TwoStageLpt, LptSwap)}
NAMES = tuple(PLANNERS)


def planner_named(name: str, *, alpha: float = 1.0) -> Planner:
    """The planner of that name; `alpha` is for the one that has it."""
    if name not in PLANNERS:
        raise CanzonaError(
            f"there is no ownership planner {name!r}", at="the option planner", hint=f"use one of {', '.join(NAMES)}"
        )
    kind = PLANNERS[name]
    return AlphaBalanced(alpha) if kind is AlphaBalanced else kind()
