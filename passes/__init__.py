"""All passes in the order in which they run. Every step is made by these lists, in runs and in forecasts.

`ir.pipeline.run` applies a list and verifies the step after each pass. A pass takes steps of one form and returns
steps of another:

    pass               requires  -> ensures    what it decides
    planning: once per set of parameters
    canonicalize       captured  -> captured   one spelling per idiom
    store-state        captured  -> captured   how leaves of the state are stored between steps
    place              captured  -> placed     what runs on fragments, what on the owner, and what travels
    gram               placed    -> placed     iterations on small Gram matrices (fast numerics)
    assign-owners      placed    -> owned      which rank computes each matrix, or that every rank does
      follow-owners    placed    -> owned      ... as a plan file says
    one-owner          owned     -> owned      that one rank steps all parameters at once, if they depend on another
    ZeRO-1: once per model, for all of its optimizers
    form-buckets       owned     -> owned      where gradients and parameters lie when ranks reduce and gather them
    owner-replica      owned     -> owned      that only the owner's replica updates a matrix
    first step of each task: once per set of parameters
    place              captured  -> placed     as above, for the optimizer's own eager step
    inherit-owners     placed    -> owned      the owners of the planned step
    lowering: once per set of tasks that take part in a step
    micro-group        owned     -> grouped    which tasks travel together
      follow-groups    owned     -> grouped    ... as a plan file says
    fuse-collectives   grouped   -> routed     where each value lies in one all-to-all per micro-group and direction
    symmetry           routed    -> routed     which products are computed by half
    padding            routed    -> routed     which matrices are padded, so that rows of their products are aligned
    widen              routed    -> routed     which bfloat16 products CPUs compute in float32 (fast numerics)
    batch              routed    -> batched    which tasks alike are computed together, and which as stacks
    schedule           batched   -> scheduled  the order of all events, and the memory slots of buffers
    emission: once per lowered step and rank
    emit               scheduled -> emitted    the program of one rank
    lowering anew: for forecasts alone
    reopen             scheduled -> owned      nothing: it takes a schedule back
    ...                owned     -> scheduled  the lowering, with other options

A pass is a frozen dataclass whose fields are its options. It imports no other pass, and prints, times and mutates
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from canzona_compile.codegen.launch import available
from canzona_compile.ir.options import Options
from canzona_compile.ir.pipeline import Pass
from canzona_compile.ir.step import Step
from canzona_compile.machine.hardware import Machine
from canzona_compile.ownership import planner_named
from canzona_compile.passes.assign_owners import AssignOwners
from canzona_compile.passes.batch import Batching
from canzona_compile.passes.canonicalize import Canonicalize
from canzona_compile.passes.emit import Emit
from canzona_compile.passes.follow_plan import FollowGroups, FollowOwners, InheritOwners
from canzona_compile.passes.form_buckets import FormBuckets
from canzona_compile.passes.fuse_collectives import FuseCollectives
from canzona_compile.passes.gram import GramIterations
from canzona_compile.passes.micro_group import FormMicroGroups
from canzona_compile.passes.owner_replica import OwnerReplica
from canzona_compile.passes.padding import Padding
from canzona_compile.passes.place import Place
from canzona_compile.passes.reopen import Reopen
from canzona_compile.passes.schedule import Schedule
from canzona_compile.passes.store_state import StoreState
from canzona_compile.passes.symmetry import Symmetry
from canzona_compile.passes.widen import Widening

__all__ = [
    "AssignOwners",
    "Batching",
    "Canonicalize",
    "Emit",
    "FollowGroups",
    "FollowOwners",
    "FormBuckets",
    "FormMicroGroups",
    "FuseCollectives",
    "GramIterations",
    "InheritOwners",
    "OwnerReplica",
    "Padding",
    "Place",
    "Reopen",
    "Schedule",
    "StoreState",
    "Symmetry",
    "Widening",
    "emission_passes",
    "first_step_passes",
    "lowering_passes",
    "planning_passes",
    "relowering_passes",
    "zero1_passes",
]


def planning_passes(options: Options, owned_as: Step | None = None, complete: bool = True) -> list[Pass]:
    """From captured templates (CAPTURED) to owners (OWNED): once per set of parameters.

    Args:
        owned_as: a step that has the owners of the same tasks already; None if they are to be chosen.
        complete: whether the step has the parameters of all optimizers that step together.
    """
    exact = options.numerics == "exact"
    assign: Pass = AssignOwners(options.strategy, planner_named(options.planner, alpha=options.alpha))
    if options.plan is not None:
        assign = FollowOwners(options.plan)
    if owned_as is not None:
        assign = InheritOwners(owned_as)
    return [
        Canonicalize(),
        StoreState(options.state, complete and owned_as is None),
        Place(exact=exact),
        *([] if exact else [GramIterations()]),
        assign,
    ]


def zero1_passes(ranks: Sequence[int], bucket_bytes: int, whole: frozenset[str], rank: int) -> list[Pass]:
    """From the owners of all tasks to buckets, and to tasks that run in the owner's replica alone (OWNED to OWNED)."""
    return [FormBuckets(tuple(ranks), bucket_bytes, whole, rank), OwnerReplica(len(ranks))]


def first_step_passes(owned: Step) -> list[Pass]:
    """From interpreted templates (CAPTURED) to the owners of `owned` (OWNED): once per set of parameters."""
    return [Place(), InheritOwners(owned)]


def lowering_passes(options: Options, symmetric: frozenset[tuple[str, str]] = frozenset()) -> list[Pass]:
    """From owners (OWNED) to a schedule (SCHEDULED): once per set of tasks that take part in a step.

    Args:
        options: `numerics`, and `plan` or else `capacity`, `micro_groups` and `depth` count.
        symmetric: (family, leaf) of the owners' state that is symmetric now.
    """
    exact, plan = options.numerics == "exact", options.plan
    form_groups = FormMicroGroups(options.any_capacity, options.micro_groups, options.depth, exact, options.agreed)
    return [
        form_groups if plan is None else FollowGroups(plan),
        FuseCollectives(),
        Symmetry(symmetric),
        Padding(),
        *([] if exact else [Widening()]),
        Batching(exact=exact),
        Schedule(depth=options.depth if plan is None else plan.depth),
    ]


def emission_passes(rank: int, machine: Machine) -> list[Pass]:
    """From a schedule (SCHEDULED) to the program of one rank (EMITTED)."""
    return [Emit(rank, generate=generates(machine))]


def generates(machine: Machine) -> bool:
    """Does elementwise work run in generated kernels? On CPU torch's own are faster to have and bit-equal."""
    return machine.device == "cuda" and available()


def relowering_passes(options: Options) -> list[Pass]:
    """From a schedule to another one of the same tasks and owners (SCHEDULED to SCHEDULED), for forecasts."""
    return [Reopen(), *lowering_passes(options)]
