"""The figures of a plan: plain data, no logic. `report.build` fills them in, `report.terminal` renders them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from canzona_compile.ir.layout import Shape
from canzona_compile.ir.step import Machine


@dataclass(frozen=True, slots=True)
class LocalTask:
    """A parameter that its ranks update by themselves, without communication, and why."""

    name: str
    shape: Shape
    why: str


@dataclass(frozen=True, slots=True)
class ProfileReport:
    """Seconds that the busiest rank is predicted to compute, for each step of a period of periodic work.

    Attributes:
        together: with all matrices doing it on the same step.
        apart: with `stagger=True`.
        staggered: is that so in this plan?
    """

    together: tuple[float, ...]
    apart: tuple[float, ...]
    staggered: bool


@dataclass(frozen=True, slots=True)
class Facts:
    """What a step does not know of itself.

    Attributes:
        world_size: ranks of the job.
        captures: graphs that Dynamo was asked for, since `wrap`.
        local: parameters that the optimizer's own eager step updates on their fragments.
        interpreted: task name -> why the owner runs the eager step instead of a graph.
        suggestions: what the user could do to make the step cheaper, one sentence each.
        numerics: "exact" or "fast".
        variants: control-flow variants captured so far.
        rank_programs: programs that this rank has emitted so far.
        buffer_bytes: of the buffers of all of them, which this rank allocated once.
        execution: how the last one runs on its device, call by call or as a CUDA graph, and why.
        profile: None where no work is periodic.
    """

    world_size: int = 1
    captures: int = 0
    local: tuple[LocalTask, ...] = ()
    interpreted: Mapping[str, str] = field(default_factory=dict)
    suggestions: tuple[str, ...] = ()
    numerics: str = "exact"
    variants: int = 0
    rank_programs: int = 0
    buffer_bytes: int = 0
    execution: str = ""
    profile: ProfileReport | None = None


@dataclass(frozen=True, slots=True)
class WireReport:
    """A value that travels between fragments and owner; `bytes` of that of one whole matrix."""

    direction: str  # "gather" or "scatter"
    name: str
    shape: Shape
    dtype: str
    bytes: int


@dataclass(frozen=True, slots=True)
class TemplateReport:
    """A template, cut for one kind of layout.

    Attributes:
        kind: of layout that the cut is for, e.g. "sharded+aligned".
        tasks: number of matrices that use it.
        formula: FLOPs of the graph that the owner runs for one matrix of m x n, a sympy expression. With fast numerics
            that is the graph on Gram matrices, where there is one. Symmetric products count in full.
        flops: its value.
        resident: state that lives on the owner only.
        interpreted: why the optimizer's own eager step runs; empty if a graph does.
    """

    name: str
    kind: str
    shape: Shape
    dtype: str
    tasks: int
    formula: str
    flops: int
    wires: tuple[WireReport, ...]
    resident: tuple[str, ...]
    interpreted: str


@dataclass(frozen=True, slots=True)
class TaskReport:
    """One matrix: its owner's global rank (None: every rank computes it) and FLOPs per step."""

    name: str
    shape: Shape
    template: str
    layout: str
    owner: int | None
    micro_group: int
    strategy: str
    flops: int
    reason: str


@dataclass(frozen=True, slots=True)
class GridReport:
    """Global ranks that share the tasks of a micro-group: `ranks[replica][shard]`."""

    replicas: int
    shards: int
    ranks: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class GroupReport:
    """A micro-group. Bytes are those that leave a rank for another, summed over all ranks.

    Attributes:
        tasks: names.
        makespan_flops: FLOPs of its busiest owner.
        collectives: that each rank of the grid takes part in.
    """

    index: int
    grid: GridReport
    tasks: tuple[str, ...]
    gather_bytes: int
    scatter_bytes: int
    exchange_bytes: int
    makespan_flops: int
    collectives: int


@dataclass(frozen=True, slots=True)
class LoadReport:
    """FLOPs per step that one global rank spends on distributed matrices, per micro-group too."""

    rank: int
    tasks: int
    flops: int
    by_group: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class PredictedEvent:
    """An event of the schedule and when it is predicted, in seconds from the begin of the step.

    A `start ...` event lasts as long as its transfer, a `wait ...` event as long as it has to wait;
    elementwise work (prepare, apply) counts as nothing.
    """

    act: str
    micro_group: int
    stream: str  # "compute" or "link"
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Figures:
    """A plan in figures.

    Attributes:
        captures, variants, rank_programs, buffer_bytes, execution, numerics, profile: see `Facts`.
        depth: micro-groups in flight at once.
        collectives_per_step: by each rank of a micro-group's grid: with owners two where it is sharded,
            one where it is replicated, three where it is both; where every rank computes everything one
            gather if it is sharded, and one meeting of all replicas if it is replicated.
        wire_bytes_per_element: bytes that leave a rank in one step, summed over all ranks, per
            element of a distributed matrix.
        imbalance: FLOPs of the busiest rank over those of the mean rank; 1 if nothing is
            distributed.
        predicted_seconds: per step, without elementwise work.
        fallbacks: task name -> why it is interpreted.
    """

    world_size: int
    optimizer: str
    machine: Machine
    numerics: str
    captures: int
    variants: int
    rank_programs: int
    buffer_bytes: int
    execution: str
    depth: int
    collectives_per_step: int
    wire_bytes_per_element: float
    imbalance: float
    predicted_seconds: float
    templates: tuple[TemplateReport, ...]
    micro_groups: tuple[GroupReport, ...]
    tasks: tuple[TaskReport, ...]
    loads: tuple[LoadReport, ...]
    local: tuple[LocalTask, ...]
    fallbacks: Mapping[str, str]
    suggestions: tuple[str, ...]
    schedule: tuple[PredictedEvent, ...]
    profile: ProfileReport | None
