"""The figures of a plan, of a run or made offline: plain data, no logic. `report.build` fills them in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from canzona_compile.ir.layout import Shape
from canzona_compile.machine.hardware import Machine
from canzona_compile.session.measuring import Measurement
from canzona_compile.simulation.engine import Span


@dataclass(frozen=True, slots=True)
class LocalTask:
    """A parameter that each rank updates by itself, without communication, and why."""

    name: str
    shape: Shape
    why: str


@dataclass(frozen=True, slots=True)
class BufferMemory:
    """The bytes of send, receive and gathered buffers on this rank.

    Attributes:
        buffers: of those that stay between steps and serve all programs.
        first_buffers: of those of first steps, which gave them back.
    """

    buffers: int = 0
    first_buffers: int = 0


@dataclass(frozen=True, slots=True)
class ProfileReport:
    """Seconds that the busiest rank is predicted to compute, for each step of a period of periodic work.

    Attributes:
        together: if all matrices do that work on the same step.
    """

    together: tuple[float, ...]
    apart: tuple[float, ...]
    staggered: bool


@dataclass(frozen=True, slots=True)
class MeasuredPhase:
    """What measured steps spent in one phase, in seconds.

    Attributes:
        mean: over ranks and steps. The means of all phases add up to that of the step, less what streams do at once.
        worst: of the longest step, of the mean rank. It differs from the mean where some steps do more than others.
        slowest_rank: the global rank that takes longest in the mean step.
        predicted: of the mean step; None where nothing predicts it, or with rates that were not measured.
    """

    name: str
    about: str
    mean: float
    median: float
    worst: float
    slowest_rank: int
    slowest: float
    skew: float
    predicted: float | None
    error: float | None


@dataclass(frozen=True, slots=True)
class MeasuredReport:
    """Measured steps, with predictions next to them if their rates were measured, too.

    Seconds are means over ranks and steps.

    Attributes:
        seconds: of a step. Under ZeRO-1 the reductions before it and the gathers after it are included.
        predicted_seconds: of a step, by the simulation of the steps that were measured; None if `assumed` has rates.
        overlapped: in which streams of a device were in several phases at once; 0 on CPU.
        assumed: names of the rates, among those that predictions use, that were not measured on this machine.
    """

    steps: int
    ranks: int
    clock: str
    seconds: float
    worst_seconds: float
    predicted_seconds: float | None
    error: float | None
    exposed: float
    exposed_worst: float
    overlapped: float
    assumed: tuple[str, ...]
    phases: tuple[MeasuredPhase, ...]


@dataclass(frozen=True, slots=True)
class StateFigure:
    """Leaves of the state on this rank that have one name and are stored in one way.

    Attributes:
        stored: "int8", "bfloat16", "cpu", or a dtype and "cpu"; empty for as the optimizer has it.
        bytes: that they take; `plain_bytes` is what they would take in their own dtype.
    """

    leaf: str
    dtype: str
    stored: str
    tensors: int
    bytes: int
    plain_bytes: int


@dataclass(frozen=True, slots=True)
class RunFigures:
    """The figures of a run that its step does not contain.

    Attributes:
        captures: how many graphs Dynamo was asked for since `wrap`.
        local: parameters that the optimizer's own eager step updates on their fragments.
        fallbacks: task name -> why the owner runs the eager step instead of a graph.
        bits: a sentence for each optimizer that batches matrices: results have the bits of each matrix alone.
        suggestions: what the user could do to make the step cheaper, one sentence each.
        capacity: the most bytes that a micro-group gathers to one rank, unless a matrix alone is larger.
        execution: how the last of these programs runs on its device, call by call or as a CUDA graph, and why.
        profile: None where no work is periodic.
        state: the leaves of the state on this rank, if `state=` is given.
        skipped_steps: how many steps were skipped; None unless `skip_nonfinite` is given.
    """

    world_size: int = 1
    captures: int = 0
    local: tuple[LocalTask, ...] = ()
    fallbacks: Mapping[str, str] = field(default_factory=dict)
    bits: tuple[str, ...] = ()
    suggestions: tuple[str, ...] = ()
    numerics: str = "exact"
    variants: int = 0
    rank_programs: int = 0
    capacity: int = 0
    memory: BufferMemory = field(default_factory=BufferMemory)
    execution: str = ""
    profile: ProfileReport | None = None
    state: tuple[StateFigure, ...] = ()
    skipped_steps: int | None = None


@dataclass(frozen=True, slots=True)
class Facts(RunFigures):
    """What a report is made of, in addition to the step.

    Attributes:
        measurement: the steps that were measured last; None if there are none.
    """

    measurement: Measurement | None = None


@dataclass(frozen=True, slots=True)
class WireReport:
    """A value that travels between fragments and owner; `bytes` is its size for one whole matrix."""

    direction: str  # "gather" or "scatter"
    name: str
    shape: Shape
    dtype: str
    bytes: int


@dataclass(frozen=True, slots=True)
class TemplateReport:
    """A template, cut for one kind of layout.

    Attributes:
        kind: the kind of layout that the cut is for, e.g. "sharded+aligned".
        formula: FLOPs of the graph that the owner runs for one matrix of m x n, a sympy expression. With fast numerics
            the owner runs the graph on Gram matrices, where there is one. Symmetric products count in full.
        resident: state that only the owner holds.
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
    """A micro-group. Bytes are those that ranks send to other ranks.

    Attributes:
        makespan_flops: FLOPs of its busiest owner.
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
    """FLOPs per step that one global rank spends on distributed matrices, in all and per micro-group."""

    rank: int
    tasks: int
    flops: int
    by_group: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class BucketReport:
    """One bucket.

    Attributes:
        index: its position; the gradients of bucket 0 are complete first.
        padding: elements that padding and alignment add.
        uniform: whether all shards are padded to equal length.
        shards: elements of each owner's shard, without padding.
    """

    index: int
    dtype: str
    parameters: int
    elements: int
    padding: int
    uniform: bool
    shards: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DataParallelReport:
    """What one data-parallel rank sends in each phase of an iteration.

    Attributes:
        owners: the number of data-parallel ranks that share the matrices.
        buckets: in the order in which backward completes them.
        backward_bytes: to reduce gradients to their owners.
        forward_bytes: to gather parameters, after the step or under the next forward pass.
    """

    owners: int
    buckets: tuple[BucketReport, ...]
    backward_bytes: int
    step_bytes: int
    forward_bytes: int


@dataclass(frozen=True, kw_only=True)  # no slots: classes inherit from this one and another
class Figures:
    """What a plan decides, in figures: the part that a report of a run and a forecast have in common.

    Attributes:
        collectives_per_step: how many each rank of a micro-group's grid takes part in. With owners there are two on a
            sharded grid, one on a replicated grid, and three on a grid that is both. Where every rank computes
            everything, a sharded grid has one gather, and a replicated grid has one meeting of all replicas.
        wire_bytes_per_element: bytes that ranks send to other ranks in one step, per element of a distributed
            matrix.
        imbalance: FLOPs of the busiest rank over those of the mean rank; 1 if no matrix
            is distributed.
        data_parallel: the buckets of ZeRO-1; None without it.
        measured: what `measure()` found; None if it was not called, or not for this plan.
    """

    optimizer: str
    depth: int
    collectives_per_step: int
    wire_bytes_per_element: float
    imbalance: float
    templates: tuple[TemplateReport, ...]
    micro_groups: tuple[GroupReport, ...]
    tasks: tuple[TaskReport, ...]
    loads: tuple[LoadReport, ...]
    data_parallel: DataParallelReport | None = None
    measured: MeasuredReport | None = None


@dataclass(frozen=True, kw_only=True)
class RunReport(Figures, RunFigures):
    """A plan that runs, in figures.

    Attributes:
        predicted_seconds: of the simulated step. Under ZeRO-1 the reductions before it and the gathers after it are
            included. The machine says which of its rates were measured; the others are assumed. None beside measured
            steps that have no prediction; there is no schedule then, either.
        schedule: what the rank that computes most does in the simulated step.
    """

    machine: Machine
    predicted_seconds: float | None
    schedule: tuple[Span, ...]
