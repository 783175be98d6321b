"""The options of `wrap`, `zero1` and `plan`: which of them each takes, what they mean, and what they may be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypedDict, get_args

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Parameter
from torch.optim import Optimizer

from canzona_compile.errors import CanzonaError
from canzona_compile.ir.plan_file import PlanFile, read_plan
from canzona_compile.ir.sharding import GivenLayout, LayoutOption
from canzona_compile.ir.split import Split, splits_of
from canzona_compile.ir.storage import StateOption, StateRules, rules_of
from canzona_compile.machine.hardware import Hardware, named_hardware
from canzona_compile.ownership import planner_named

StrategyOption = Literal["auto", "owner", "replicated"]
Numerics = Literal["exact", "fast"]
MissingGrads = Literal["skip", "zero"]
CAPACITY = 512 * 2**20  # bytes, where nobody knows how much memory is free
LARGEST_CAPACITY = 2**30  # bytes; beyond this, larger micro-groups are hardly faster
LEAST_CAPACITY = 2**24  # bytes; below this, there would be a micro-group for each matrix
SHARE = 32  # of free memory; a step's buffers are up to eight times the capacity, with two micro-groups in flight
# What arguments may be, where later checks would fail with an error of Python.
KINDS: Mapping[str, tuple[Any, str]] = {
    "alpha": (int | float, "a number from 0 (even communication) to 1 (even load)"),
    "split": (Mapping | None, 'rows by patterns of names, as in {"*.qkv.weight": {"q": 4096, "k": 1024, "v": 1024}}'),
    "hardware": (
        str | Path | Hardware | None,
        'the name of a machine, a file that `canzona-compile calibrate` wrote, or "assumed"',
    ),
    "plan": (str | Path | PlanFile | Mapping | None, "a plan, or its file"),
}


class PlanningOptions(TypedDict, total=False):
    """What `plan`, `zero1` and `wrap` take; `Options` describes each."""

    numerics: Numerics
    capacity: int | None
    micro_groups: int | None
    depth: int
    planner: str
    alpha: float
    state: StateOption


class StepOptions(PlanningOptions, total=False):
    """What `zero1` and `wrap` take."""

    missing_grads: MissingGrads
    skip_nonfinite: bool
    stagger: bool
    split: Mapping[str, Split | Mapping[str, int]] | None
    layout: LayoutOption
    hardware: str | Path | Hardware | None
    plan: str | Path | PlanFile | None
    cuda_graphs: bool
    audit: int | None
    one_per_matrix: Callable[[list[Parameter]], Optimizer] | None


class WrapOptions(StepOptions, total=False):
    """What `wrap` takes."""

    replicate: DeviceMesh | ProcessGroup | None
    strategy: StrategyOption


@dataclass(frozen=True, slots=True)
class Options:
    """The options of `wrap`, most of which `zero1` and `plan` take, too. Fields hold what was made of arguments.

    Attributes:
        replicate: the one-dimensional mesh, or the process group, over which parameters are equal copies, as under
            DDP: plain parameters, or DTensors of another mesh (tensor parallel). These ranks then share the work.
            Without `replicate` every rank computes such parameters alone.
        strategy: "owner" (one rank computes each matrix), "replicated" (every rank computes every matrix) or "auto"
            (the one with the shorter predicted time, for each set of ranks).
        numerics: "exact" gives the bits of the plain optimizer on one CPU for the same gradients; on CUDA it keeps
            the algorithm and the precisions, and computes one half of symmetric products. "fast" also allows rewrites
            that change rounding: batched matrix products wherever they exist, and iterations on Gram matrices, in
            float16 if the matrices have 16 bits.
        capacity: the most bytes that one micro-group gathers to one rank; a larger matrix is a micro-group of its own.
            None takes 512 MiB; under `wrap` on CUDA ranks that share matrices choose it before their first plan, by the
            memory that is free on the rank with least, and keep it.
        micro_groups: how many micro-groups to aim at per set of ranks; None chooses by predicted time.
        depth: how many micro-groups are in flight at once; with 1 nothing overlaps.
        missing_grads: "skip" skips parameters whose `grad` is None on all ranks, as the plain optimizer does; if some
            ranks have a gradient, `wrap` raises an error, and under `zero1` the others count as zeros, as in DDP.
            "zero" treats a missing gradient as zeros.
        skip_nonfinite: whether no rank updates anything on a step for which any rank has a NaN or an infinity in a
            gradient. `optimizer.param_groups[0]["skipped_steps"]` counts such steps, also in checkpoints. The ranks of
            the job have to share a matrix, because they tell each other with what they compare before each step. On
            CUDA the host waits for backward then.
        stagger: whether to spread the work that is done every k steps (eigendecompositions) over steps, so that no
            step does it for all matrices. Each matrix then reads its counters as if it were up to k - 1 steps ahead.
        split: the parameters that hold several matrices, by pattern of their names ("*.qkv.weight"): the rows of
            each part by its name, {"q": 4096, "k": 1024, "v": 1024}, or a `Split`, which also says how the parts lie.
            The optimizer sees each part as a parameter of its own. Checkpoints hold state that is not shaped like the
            parameter per part, so that only the same split can load it.
        layout: how plain tensors are sharded if each rank holds a fragment (Megatron, DeepSpeed AutoTP, tensor
            parallelism by hand); under `zero1`, over ranks of other mesh dims than the data-parallel one. Pass a dict
            from patterns of names to a `DeviceMesh` and one placement per mesh dim,
            {"*.fc1.weight": (mesh, [Shard(0)])}, with None for parameters that every rank holds whole, or a function of
            name and parameter that returns this. The first pattern that matches counts. A mesh alone is the
            tensor-parallel mesh of the parameters that have Megatron's attributes `tensor_model_parallel`,
            `partition_dim` and `partition_stride`; experts (`allreduce=False`) need more. A `ProcessGroup` is a mesh of
            one dim. Fragments may differ in size; ranks tell each other at the first step.
        names: no argument: for each parameter group, the names that `model` gives to its parameters.
        prefix: no argument: begins the names of parameters that nobody named, if there are several optimizers.
        planner: the rule that chooses owners: "lpt-swap", "lpt" or "alpha".
        alpha: for the planner "alpha", from 0 (even communication) to 1 (even load).
        hardware: the rates that decisions use: a name, or a file that `canzona-compile calibrate` wrote. By default
            ranks that share matrices measure them before their first plan, which takes a part of a second. With
            "assumed" they take those of a usual machine of the kind of device, as ranks do that share nothing.
        plan: a plan, or its file, made by `canzona_compile.plan`, `canzona-compile plan --format json` or
            `optimizer.canzona.plan()`. The run takes its owners and micro-groups, and plans nothing else.
        cuda_graphs: on CUDA, whether to record steps as CUDA graphs and replay them. Otherwise every step runs call by
            call; that takes more host time, and no memory for recordings.
        audit: if given, every so many steps all ranks compute one matrix of each kind once more, whole, by the class's
            own step, and raise if a bit differs. It costs a gather of these matrices and their update on every rank.
        one_per_matrix: a function that makes an optimizer of the parameters that it gets, such as
            `lambda params: SOAP(params, lr=1e-3)`. Each matrix then has an optimizer object of its own, for optimizers
            that keep on themselves what belongs to a parameter. Hyperparameters are those of the parameter's group.
        state: how state is stored between steps, in place of the dtype and the device that the optimizer gives it:
            "int8" (a byte per element, and a scale for each 128 of a row), "bfloat16", "cpu" (host memory), or a dtype
            and "cpu". A text is for all leaves; "int8" then takes running means of the gradients of matrices, and all
            other leaves have bfloat16. A dict has texts by patterns of names of leaves, {"momentum_buffer": "int8",
            "exp_avg*": "bfloat16 cpu"}, of which the first that fits counts. Results have the bits of the plain
            optimizer whose state `round_state` rounds. Checkpoints hold the plain optimizer's dtypes.
        agreed: no argument: by the global ranks of a grid, the capacity that they chose; empty until they have.
        measured: no argument: the rates that ranks have measured; None until they have.

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
    skip_nonfinite: bool = False
    stagger: bool = False
    split: tuple[tuple[str, Split], ...] = ()
    layout: GivenLayout | None = None
    names: tuple[tuple[str, ...], ...] = ()
    prefix: str = ""
    planner: str = "lpt-swap"
    alpha: float = 1.0
    hardware: Hardware | Literal["assumed"] | None = None
    plan: PlanFile | None = None
    cuda_graphs: bool = True
    audit: int | None = None
    one_per_matrix: Callable[[list[Parameter]], Optimizer] | None = None
    state: StateRules | None = None
    agreed: tuple[tuple[tuple[int, ...], int], ...] = field(default=(), compare=False)
    measured: Hardware | None = field(default=None, compare=False)

    @property
    def rates(self) -> Hardware | None:
        """The rates that decisions use; None for those that are assumed."""
        if isinstance(self.hardware, Hardware):
            return self.hardware
        return self.measured if self.plan is None else self.plan.rates

    @property
    def measures(self) -> bool:
        """Whether ranks that share matrices have to measure their rates before they plan."""
        return self.hardware is None and self.measured is None and self.plan is None

    @property
    def rates_text(self) -> str:
        """What ranks that measure, or take given rates, must have in common, as text for comparison."""
        return "" if self.measures else f" hardware={getattr(self.hardware, 'digest', self.hardware)}"

    @property
    def any_capacity(self) -> int:
        """The capacity of ranks that have not agreed on one: the one that was given, or the least that is known."""
        return self.capacity or min((size for _, size in self.agreed), default=CAPACITY)

    @property
    def text(self) -> str:
        """The options that must be equal on all ranks, as text for comparison."""
        apart = {"replicate", "split", "layout", "names", "prefix", "hardware", "plan", "cuda_graphs"}
        apart |= {"agreed", "measured", "one_per_matrix"}
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
        for name in ("skip_nonfinite", "stagger", "cuda_graphs"):
            if not isinstance(getattr(self, name), bool):
                raise CanzonaError(f"{name}={getattr(self, name)!r} is neither True nor False", at=f"the option {name}")
        if self.one_per_matrix is not None and not callable(self.one_per_matrix):
            raise CanzonaError(
                f"one_per_matrix= takes a function of a list of parameters, not a {type(self.one_per_matrix).__name__}",
                at="the option one_per_matrix",
                hint="pass one such as lambda params: SOAP(params, lr=1e-3)",
            )
        if self.one_per_matrix is not None and self.state is not None:
            raise CanzonaError(
                "one_per_matrix= makes optimizer objects that keep their state themselves",
                at="the option state",
                hint="pass only one of the two",
            )
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


def made_options(
    call: str, known: frozenset[str], given: Mapping[str, Any], replicas: int | None = None, **fixed: Any
) -> Options:
    """Make the options of a call, and read the files that they name.

    Args:
        replicas: the data-parallel ranks of `zero1`, for which the plan has to be made; None under `wrap`.
    """
    if wrong := next((name for name in given if name not in known), None):
        raise TypeError(
            f"{call}() got an unexpected keyword argument {wrong!r}; of canzona_compile.Options it takes "
            + ", ".join(sorted(known))
        )
    for name, (kind, words) in KINDS.items():
        if name in given and not isinstance(given[name], kind):
            raise CanzonaError(f"{name}={given[name]!r} is not {words}", at=f"the option {name}")
    made = {**given, **fixed}
    made["state"] = rules_of(made.get("state"))
    made["split"], made["layout"] = splits_of(made.get("split")), GivenLayout.of(made.get("layout"))
    if isinstance(rates := made.get("hardware"), str | Path) and rates != "assumed":
        made["hardware"] = named_hardware(str(rates))
    if made.get("plan") is not None:
        made["plan"] = read_plan(made["plan"])
        made["plan"].check_replicas(replicas)
    return Options(**made)
