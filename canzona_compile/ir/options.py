"""The options of `wrap`."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Literal, get_args

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from canzona_compile.errors import CanzonaError
from canzona_compile.ir.given_layout import GivenLayout
from canzona_compile.ir.plan_file import PlanFile
from canzona_compile.ir.split import Split
from canzona_compile.machine.hardware import Hardware
from canzona_compile.ownership import planner_named

StrategyOption = Literal["auto", "owner", "replicated"]
Numerics = Literal["exact", "fast"]
MissingGrads = Literal["skip", "zero"]
# Arguments of `wrap` that it converts before it makes `Options` of them: it reads files and computes names.
NOT_YET_OPTIONS = ("split", "layout", "model", "hardware", "plan")
CAPACITY = 512 * 2**20  # bytes, where nobody knows how much memory is free
LARGEST_CAPACITY = 2**30  # bytes; beyond this, larger micro-groups are hardly faster
LEAST_CAPACITY = 2**24  # bytes; below this, there would be a micro-group for each matrix
SHARE = 32  # of free memory; a step's buffers are up to eight times the capacity, with two micro-groups in flight


@dataclass(frozen=True, slots=True)
class Options:
    """The validated keyword arguments of `wrap`.

    Attributes:
        replicate: the ranks that hold equal copies of parameters, as under DDP. The parameters are plain tensors, or
            DTensors of a tensor-parallel mesh. None means that each rank computes such parameters alone.
        strategy: "owner" computes each matrix on one rank, "replicated" computes it on every rank, and "auto" picks
            the strategy with the shorter predicted time for each set of ranks.
        numerics: "exact" keeps every bit of the plain optimizer on one device; on CUDA it may change the order of
            sums in symmetric products. "fast" also allows rewrites that change rounding: batched matrix products
            wherever they exist, and iterations on Gram matrices, in float16 if the matrices have 16 bits.
        capacity: the most bytes that one micro-group may gather to its busiest owner rank; None chooses it by the
            memory that is free before the first plan on CUDA, and takes `CAPACITY` elsewhere.
        micro_groups: how many micro-groups to aim at per set of ranks; None picks the number by predicted time.
        depth: how many micro-groups are in flight at once. With 1, gather, compute and scatter never overlap.
        missing_grads: with "skip", a parameter whose `grad` is None on all ranks is left alone, and it is an error
            if `grad` is None on some ranks only. With "zero", a missing gradient counts as zeros on every rank.
        stagger: whether to shift periodic work (refreshes) per matrix, so that no step does it for all matrices.
        split: patterns of parameter names, each with the logical matrices of the parameters that it matches.
        layout: what the user says of plain tensors that are fragments; None if nothing.
        names: the names of the parameters in each parameter group, for parameter groups without `param_names`.
        prefix: begins the names of parameters that nobody named; `wrap` sets it for the optimizers of a chain.
        planner: the rule that chooses owner ranks, one of `ownership.NAMES`.
        alpha: the parameter of the rule "alpha", from 0 (even communication) to 1 (even load).
        hardware: the rates that predictions use; None takes those that are assumed for the kind of device.
        plan: owner ranks and micro-groups that are taken instead of planning them.
        cuda_graphs: on CUDA, whether to record steps as CUDA graphs and replay them if that is possible.
        audit: the number of steps after which one matrix of each kind is compared with the plain optimizer's; None for
            no audit.
        agreed: by the global ranks of a grid, the capacity that they chose; empty until they have.

    Raises:
        CanzonaError: an option has an impossible value.
    """

    replicate: DeviceMesh | ProcessGroup | None = None
    strategy: StrategyOption = "auto"
    numerics: Numerics = "exact"
    capacity: int | None = None
    micro_groups: int | None = None
    depth: int = 2
    missing_grads: MissingGrads = "skip"
    stagger: bool = False
    split: tuple[tuple[str, Split], ...] = ()
    layout: GivenLayout | None = None
    names: tuple[tuple[str, ...], ...] = ()
    prefix: str = ""
    planner: str = "joint"
    alpha: float = 1.0
    hardware: Hardware | None = None
    plan: PlanFile | None = None
    cuda_graphs: bool = True
    audit: int | None = None
    agreed: tuple[tuple[tuple[int, ...], int], ...] = field(default=(), compare=False)

    @property
    def any_capacity(self) -> int:
        """The capacity of ranks that have not agreed on one: the one that was given, or the least that is known."""
        return self.capacity or min((size for _, size in self.agreed), default=CAPACITY)

    @property
    def text(self) -> str:
        """The options that must be equal on all ranks, as text for comparison."""
        apart = ("replicate", "split", "layout", "names", "prefix", "hardware", "plan", "cuda_graphs", "agreed")
        names = [f.name for f in fields(self) if f.name not in apart]
        splits = [f"{pattern} is {split}" for pattern, split in self.split]
        if self.plan is not None:
            splits.append(f"plan {self.plan.fingerprint}")
        return " ".join([*(f"{name} {getattr(self, name)}" for name in names), *splits])

    def __post_init__(self) -> None:
        for name, kind in (("strategy", StrategyOption), ("numerics", Numerics), ("missing_grads", MissingGrads)):
            value, allowed = getattr(self, name), get_args(kind)
            if value not in allowed:
                raise CanzonaError(
                    f"{name}={value!r} is not one of {', '.join(map(repr, allowed))}", at=f"the option {name}"
                )
        planner_named(self.planner, alpha=self.alpha)
        for name in ("stagger", "cuda_graphs"):
            if not isinstance(getattr(self, name), bool):
                raise CanzonaError(f"{name}={getattr(self, name)!r} is neither True nor False", at=f"the option {name}")
        if self.audit is not None and self.numerics != "exact":
            raise CanzonaError(
                'audit= compares bits, but numerics="fast" changes them',
                at="the option audit",
                hint='pass numerics="exact", or compare with verify()',
            )
        if self.audit is not None and self.stagger:
            raise CanzonaError(
                "audit= compares with the plain optimizer, which does not stagger its periodic work",
                at="the option audit",
                hint="pass only one of the two",
            )
        for name in ("capacity", "depth", "micro_groups", "audit"):
            value = getattr(self, name)
            if name != "depth" and value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise CanzonaError(f"{name}={value!r} is not a positive integer", at=f"the option {name}")
        if self.replicate is not None and not isinstance(self.replicate, DeviceMesh | ProcessGroup):
            raise CanzonaError(
                f"replicate= takes a DeviceMesh or a ProcessGroup, not a {type(self.replicate).__name__}",
                hint="pass the data-parallel mesh or group over which the parameters are equal",
            )
        if isinstance(self.replicate, DeviceMesh) and self.replicate.ndim != 1:
            raise CanzonaError(
                f"replicate= takes a one-dimensional mesh; this one has {self.replicate.ndim} dims",
                hint="pass one dim of it, mesh['dp'], or flatten the dims that replicate",
            )


def capacity_within(free: int) -> int:
    """The capacity for so many bytes of free memory: a power of two, so that runs with nearly as much choose alike."""
    return max(LEAST_CAPACITY, min(LARGEST_CAPACITY, 1 << max(1, free // SHARE).bit_length() - 1))
