"""Planners, which choose the rank that computes each matrix. Any planner can replace any other.

`jobs.py` says what a planner is. `static` and `alpha` are the rules of Canzona's authors, which keep the order of the
flat buffer; `permuted` changes that order so that collectives stay uniform; `lpt` and `joint` place jobs freely, in two
stages or in one; `exact` finds the optimum, or says how far from it it may be. Each class states what is proven of it,
and its `bound` gives the factor.
"""

from __future__ import annotations

from canzona_compile.errors import CanzonaError
from canzona_compile.ownership.alpha import AlphaBalanced
from canzona_compile.ownership.buffer import BUCKET
from canzona_compile.ownership.exact import SECONDS, Exact
from canzona_compile.ownership.jobs import Planner
from canzona_compile.ownership.lpt import Joint, TwoStageLpt
from canzona_compile.ownership.permuted import Permuted
from canzona_compile.ownership.static import StaticStart

NAMES = ("static", "alpha", "lpt", "joint", "permuted", "exact")


def planner_named(name: str, *, alpha: float = 1.0, bucket: int = BUCKET, seconds: float = SECONDS) -> Planner:
    """The planner of that name. It ignores options that it does not have.

    Args:
        name: the name of a planner.
        alpha: how far to balance over all buckets, for `AlphaBalanced`.
        bucket: elements at which a bucket closes, for planners with buckets.
        seconds: the time limit of the solver, for `Exact`.

    Raises:
        CanzonaError: there is no planner of that name.
    """
    match name:
        case "static":
            return StaticStart(bucket)
        case "alpha":
            return AlphaBalanced(alpha, bucket)
        case "lpt":
            return TwoStageLpt()
        case "joint":
            return Joint()
        case "permuted":
            return Permuted(bucket)
        case "exact":
            return Exact(seconds)
    raise CanzonaError(
        f"there is no ownership planner {name!r}",
        at="the option planner",
        hint=f"use one of {', '.join(NAMES)}; wrap and zero1 do not take 'exact'",
    )
