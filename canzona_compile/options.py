"""What a caller of `wrap` may choose."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, get_args

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from canzona_compile.errors import CanzonaError
from canzona_compile.ir.hardware import Hardware
from canzona_compile.ir.plan_file import PlanFile
from canzona_compile.ownership import planner_named
from canzona_compile.split import Split

StrategyOption = Literal["auto", "owner", "replicated"]
Numerics = Literal["exact", "fast"]
MissingGrads = Literal["skip", "zero"]
# Arguments of `wrap` that are no options yet: it makes others of them, or reads their files.
NOT_YET_OPTIONS = ("split", "model", "hardware", "plan")


@dataclass(frozen=True, slots=True)
class Options:
    """Validated keyword arguments of `wrap`.

    Attributes:
        replicate: ranks that hold the same plain (or TP-only DTensor) parameters, as DDP does.
            None: such parameters belong to their rank alone.
        strategy: "owner" computes each matrix once, "replicated" on every rank, "auto" picks the
            cheaper one per set of ranks by predicted time.
        numerics: "exact" keeps every bit of the plain optimizer on one device, but on CUDA for the order of sums in
            products that are symmetric; "fast" also allows rewrites that change rounding: batched matrix products
            wherever they exist, and iterations on Gram matrices, in float16 where matrices have 16 bits.
        capacity: most bytes that one micro-group may gather to its busiest owner.
        micro_groups: number of them per set of ranks to aim at; None picks it by predicted time.
        depth: micro-groups in flight at once (1: gather, compute and scatter never overlap).
        missing_grads: "skip": a parameter whose `grad` is None on all ranks is left alone, one that lacks
            it on some ranks is an error. "zero": a missing gradient counts as zeros, everywhere.
        stagger: offset periodic work (refreshes) per matrix, so that no step does it for all of them.
        split: patterns of parameter names, and the logical matrices in parameters that they fit.
        names: of the parameters by group, where the groups themselves have none.
        planner: which rule chooses owners, one of `ownership.NAMES`; alpha is that of the rule "alpha".
        hardware: rates that predictions stand on; None: assumed for the kind of device.
        plan: owners and micro-groups to take instead of planning.
        cuda_graphs: on CUDA, record steps and replay them where that is possible.
    """

    replicate: DeviceMesh | ProcessGroup | None = None
    strategy: StrategyOption = "auto"
    numerics: Numerics = "exact"
    capacity: int = 512 * 2**20
    micro_groups: int | None = None
    depth: int = 2
    missing_grads: MissingGrads = "skip"
    stagger: bool = False
    split: tuple[tuple[str, Split], ...] = ()
    names: tuple[tuple[str, ...], ...] = ()
    planner: str = "joint"
    alpha: float = 1.0
    hardware: Hardware | None = None
    plan: PlanFile | None = None
    cuda_graphs: bool = True

    @property
    def text(self) -> str:
        """What ranks must have in common."""
        apart = ("replicate", "split", "names", "hardware", "plan", "cuda_graphs")
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
                    f"{name}={value!r} is none of {', '.join(map(repr, allowed))}", at=f"the option {name}"
                )
        planner_named(self.planner, alpha=self.alpha)
        for name in ("stagger", "cuda_graphs"):
            if not isinstance(getattr(self, name), bool):
                raise CanzonaError(f"{name}={getattr(self, name)!r} is neither True nor False", at=f"the option {name}")
        for name in ("capacity", "depth", "micro_groups"):
            value = getattr(self, name)
            if name == "micro_groups" and value is None:
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
                hint="take one dim of it (mesh['dp']) or flatten the dims that replicate",
            )
