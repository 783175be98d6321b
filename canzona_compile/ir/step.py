"""The intermediate representation: one frozen `Step`, lowered form by form.

A step is a list of *tasks* (one matrix update each) that share *templates* (functional graphs). The passes add what
they decide: where graphs are cut, who owns a task, which tasks travel together, in which order. Nothing here refers to
real tensors, process groups or devices; up to SCHEDULED a step is the same on every rank.

Graphs are `torch.fx` graphs over ATen operators, treated as immutable. `node.meta["val"]`, FX's own record of an
operator's result (a fake tensor or a symbolic number), is the only meta entry that is read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum
from typing import Any

import sympy
import torch
from torch import fx

from canzona_compile.errors import InvalidStep
from canzona_compile.ir.bucket import Bucket
from canzona_compile.ir.layout import Box, Grid, Layout, LayoutKind, Shape
from canzona_compile.ir.storage import BLOCK, Storage
from canzona_compile.machine.hardware import Machine


class Form(IntEnum):
    """How far a step has been lowered. Each form keeps the promises of those before it."""

    CAPTURED = 0  # one functional graph per template; every task names one
    PLACED = 1  # every task's graph is cut into prepare, compute and apply
    OWNED = 2  # every task has one owner, or all ranks compute it
    GROUPED = 3  # every task is in exactly one micro-group, whose tasks share a grid
    ROUTED = 4  # every wire value has one place in one send and one receive buffer
    BATCHED = 5  # every owned task is in exactly one batch of its owner
    SCHEDULED = 6  # a total order of events; buffers of events that overlap differ
    EMITTED = 7  # the program of one rank


class Role(StrEnum):
    PARAM = "param"
    GRAD = "grad"
    STATE = "state"
    SCALAR = "scalar"
    TASK = "task"


class Strategy(StrEnum):
    OWNER = "owner"  # gathered to one rank, computed once
    REPLICATED = "replicated"  # gathered to and computed on every rank
    LOCAL = "local"  # the whole matrix lies on one rank: no communication


@dataclass(frozen=True, slots=True)
class Leaf:
    """An input of a template: the parameter, its gradient, a state leaf or a hyperparameter.

    `dtype` is None for python numbers. `stride` is that of a state tensor that is not row-major: operands
    in columns, as decompositions return them, may give other bits. `stored` is how a state tensor is stored between
    steps; None if as it is.
    """

    role: Role
    name: str
    shape: Shape = ()
    dtype: torch.dtype | None = None
    stride: tuple[int, ...] | None = None
    stored: Storage | None = None

    @property
    def element_bytes(self) -> float:
        """Bytes of an element, or of a number, as it is stored; codes with their share of a scale."""
        if self.stored is not None:
            return self.stored.nbytes((BLOCK,), self.dtype or torch.float32) / BLOCK
        return self.dtype.itemsize if self.dtype else 8

    def nbytes(self, shape: Shape) -> float:
        """Bytes of a tensor of `shape` that is stored as the leaf is."""
        whole = None if self.stored is None or self.dtype is None else self.stored.nbytes(shape, self.dtype)
        return math.prod(shape) * self.element_bytes if whole is None else whole

    def of_stack(self, lead: Shape) -> Leaf:
        """The leaf of a stack, whose matrices lie one after the other, each as it lies alone.

        Args:
            lead: the dims that count matrices.
        """
        stride = self.stride and (*(math.prod((*lead[i + 1 :], *self.shape)) for i in range(len(lead))), *self.stride)
        return replace(self, shape=(*lead, *self.shape), stride=stride)

    def blank(self, device: torch.device) -> torch.Tensor:
        """Zeros laid out like the leaf."""
        strides = self.stride or torch.empty(self.shape, device="meta").stride()
        return torch.empty_strided(self.shape, strides, dtype=self.dtype, device=device).zero_()


@dataclass(frozen=True, eq=False, slots=True)
class Template:
    """One optimizer step of a matrix of one kind, as if on one device. A task takes it for each matrix of a stack.

    `graph` has a placeholder per leaf of `inputs`, in order and of the same name, and returns a tuple
    with the new value of every leaf in `writes`.
    """

    name: str
    shape: Shape
    dtype: torch.dtype
    inputs: tuple[Leaf, ...]
    writes: tuple[str, ...]
    graph: fx.Graph
    interpreted: str = ""  # why the optimizer's own eager step runs instead of a traced graph
    resident: tuple[str, ...] | None = None  # state that must live on the owner; None: place decides
    family: str = ""  # templates of one family are variants of one step: their state lives in the same places
    state: tuple[Leaf, ...] = ()  # all tensors of the state, also those that this variant does not touch
    precision: str = ""  # the float32 matmul precision that the step sets for its products; empty if it sets none
    draws: bool = False  # whether it draws random numbers, which one rank has to do

    @property
    def kin(self) -> str:
        """A name that all variants of one step share, and no other template has."""
        return self.family or self.name

    @property
    def numbers(self) -> list[str]:
        """The names of its hyperparameters, which all tasks of one parameter group share."""
        return [leaf.name for leaf in self.inputs if leaf.role is Role.SCALAR]

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """The leaves of the state that are known, each once."""
        known = {leaf.name: leaf for leaf in (*self.inputs, *self.state) if leaf.role is Role.STATE}
        return tuple(known.values())

    def leaf(self, name: str) -> Leaf:
        return next(leaf for leaf in self.inputs if leaf.name == name)


@dataclass(frozen=True, slots=True)
class Wire:
    """A value that crosses between fragments and owner."""

    name: str
    shape: Shape
    dtype: torch.dtype

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    def box(self, parameter_box: Box) -> Box:
        return parameter_box.of(self.shape)


@dataclass(frozen=True, eq=False, slots=True)
class Stacked:
    """A compute graph for n matrices at once, of one task or of several.

    Values are tensors [n, ...] (stacked) or lists of n tensors; `inputs` and `outputs` tell which
    wires, resident leaves and results are stacked.
    """

    graph: fx.Graph
    inputs: tuple[str, ...]
    outputs: tuple[bool, ...]


@dataclass(frozen=True, eq=False, slots=True)
class Placed:
    """A template cut for one kind of layout, into three graphs (inputs -> results):

    prepare: fragment leaves, scalars -> gather wires, then kept values
    compute: gather wires, resident state, scalars -> scatter wires, then new resident state
    apply:   scatter wires, kept values, fragment leaves, scalars -> new fragment leaves

    Of a stack, prepare and apply run on fragments of all of it, and compute for each matrix. Wires are whole stacks.
    """

    name: str
    template: Template
    kind: LayoutKind
    prepare: fx.Graph
    compute: fx.Graph
    apply: fx.Graph
    gather: tuple[Wire, ...]
    kept: tuple[str, ...]
    scatter: tuple[Wire, ...]
    fragment_writes: tuple[str, ...]
    resident: tuple[str, ...]  # state leaves that live on the owner only
    cost: sympy.Expr  # FLOPs of compute for all matrices of a task, in the dims of one
    flops: int
    stacked: Stacked | None = None  # compute for n matrices at once, if `batch` made one

    @property
    def elementwise(self) -> bool:
        """Whether every rank can update its own fragment, because nothing needs the whole matrix."""
        return not self.scatter and not self.gather and not self.resident

    @property
    def counts(self) -> bool:
        """Whether every rank writes 0-d state, even if its fragment is empty."""
        return any(leaf.name in self.fragment_writes and not leaf.shape for leaf in self.template.state)

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """The leaves of a task's state that are known. Matrices of a stack share what every rank computes."""

        def shared(leaf: Leaf) -> bool:
            return not leaf.shape and leaf.name not in self.resident

        return tuple(leaf if shared(leaf) else leaf.of_stack(self.kind.lead) for leaf in self.template.leaves)

    @property
    def stored(self) -> dict[str, Storage]:
        """How leaves of its state are stored that are not stored as they are."""
        return {leaf.name: leaf.stored for leaf in self.template.leaves if leaf.stored is not None}

    @property
    def opened(self) -> tuple[str, ...]:
        """The stored leaves that its graphs read, or that it writes."""
        if not (stored := self.stored):
            return ()
        graphs = (self.prepare, self.compute, self.apply)
        read = {str(n.target) for graph in graphs for n in graph.nodes if n.op == "placeholder" and n.users}
        return tuple(name for name in stored if name in read or name in self.template.writes)

    @property
    def owner_writes(self) -> tuple[str, ...]:
        return tuple(name for name in self.template.writes if name not in self.fragment_writes)


@dataclass(frozen=True, slots=True)
class Task:
    """The update of one logical matrix.

    Attributes:
        param_group: label of the numbers that it reads; tasks of one label share them. It is the position of the
            parameter group, or another number where counters in the state differ within a parameter group.
        template, placed: names of the template and, from PLACED on, of its cut.
        owner: (replica, shard) coordinate of the owner rank, from OWNED on; None if every rank computes.
    """

    name: str
    index: int
    param_group: int
    template: str
    layout: Layout
    placed: str = ""
    strategy: Strategy = Strategy.OWNER
    reason: str = ""
    owner: tuple[int, int] | None = None

    @property
    def shape(self) -> Shape:
        return self.layout.shape

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks that compute it."""
        grid = self.layout.grid
        return grid.members() if self.owner is None else (grid.ranks[self.owner[0]][self.owner[1]],)

    def computes_on(self, at: tuple[int, int]) -> bool:
        return self.owner is None or self.owner == at


class Phase(StrEnum):
    GATHER = "gather"  # fragments to the owner, inside each replica
    SCATTER = "scatter"  # owner to fragments, inside the owner's replica
    EXCHANGE = "exchange"  # fragments to the same shard of all replicas


@dataclass(frozen=True, slots=True)
class BlockSlice:
    """The part of a task's wire value that one block carries."""

    task: str
    wire: Wire
    box: Box
    offset: int  # bytes from the start of the block


@dataclass(frozen=True, slots=True)
class Item:
    """A wire of a task, and the fragments that an exchange has to carry."""

    task: str
    wire: Wire
    owner: tuple[int, int] | None
    boxes: tuple[Box, ...]


@dataclass(frozen=True, slots=True)
class Exchange:
    """One fused all-to-all. A *block* is what one rank sends to another one: pieces, in the order of `items`.

    Items are sorted by element size (large first) and then by wire, so that every piece is aligned and the pieces
    of equal tasks lie side by side. Blocks have padding only if element sizes are mixed.
    """

    phase: Phase
    items: tuple[Item, ...]

    def block(self, source: tuple[int, int], target: tuple[int, int]) -> tuple[tuple[BlockSlice, ...], int]:
        """The pieces that `source` sends to `target` (coordinates (replica, shard)), and the block's size in bytes."""
        pieces: list[BlockSlice] = []
        offset = 0
        shard = source[1] if self.phase is Phase.GATHER else target[1]
        for item in self._carried(source, target):
            box = item.wire.box(item.boxes[shard])
            if box.numel:
                pieces.append(BlockSlice(item.task, item.wire, box, offset))
                offset += box.numel * item.wire.itemsize
        return tuple(pieces), -(-offset // self.alignment) * self.alignment

    @property
    def alignment(self) -> int:
        return self.items[0].wire.itemsize if self.items else 1

    def _carried(self, source: tuple[int, int], target: tuple[int, int]) -> list[Item]:
        """The items of which `source` sends a part to `target`."""
        if self.phase is Phase.EXCHANGE:
            items = self.items if source[1] == target[1] else ()
            return [i for i in items if i.owner is not None and i.owner[0] == source[0]]
        items = self.items if source[0] == target[0] else ()
        if self.phase is Phase.GATHER:
            return [i for i in items if i.owner is None or i.owner == target]
        return [i for i in items if i.owner == source]


@dataclass(frozen=True, slots=True)
class Batch:
    """Equal tasks of one owner that are computed together. If the owner is None, every rank computes them.

    Attributes:
        lane: on a GPU, the stream on which it computes: 0 is that of owners' work. Batches of one lane compute one
            after the other, those of a micro-group in other lanes beside it.
    """

    placed: str
    param_group: int
    owner: tuple[int, int] | None
    tasks: tuple[str, ...]
    stacked: bool
    lane: int = 0


@dataclass(frozen=True, slots=True)
class MicroGroup:
    """Tasks whose gathers share one all-to-all and whose scatters share another."""

    index: int
    tasks: tuple[str, ...]
    gather: Exchange | None = None
    scatter: Exchange | None = None
    exchange: Exchange | None = None
    batches: tuple[Batch, ...] = ()

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        return tuple(e for e in (self.gather, self.scatter, self.exchange) if e is not None)

    def joins(self, grid: Grid) -> bool:
        """Whether the exchanges connect all ranks of the grid. Tasks that every rank computes stay in a replica."""
        return bool(self.exchanges) and (grid.replicas == 1 or self.exchange is not None)


class Act(StrEnum):
    MEET = "meet"  # ranks that no exchange connects make sure that all of them run this step
    FETCH = "fetch"  # state that is stored in another dtype, or in host memory
    PREPARE = "prepare"
    START_GATHER = "start gather"
    WAIT_GATHER = "wait gather"
    COMPUTE = "compute"
    START_SCATTER = "start scatter"
    WAIT_SCATTER = "wait scatter"
    START_EXCHANGE = "start exchange"
    WAIT_EXCHANGE = "wait exchange"
    APPLY = "apply"
    STORE = "store"  # what was fetched and has a new value


@dataclass(frozen=True, slots=True)
class Event:
    act: Act
    micro_group: int


class BufferUse(StrEnum):
    SEND = "send"
    RECEIVE = "recv"
    GATHERED = "gathered"  # whole values, unpacked from what the gather received


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory that one exchange of a micro-group needs between two events.

    Attributes:
        first, last: positions in the schedule of the events between which it is in use, both included.
        slot: index of the memory slot that holds it; -1 while none is assigned.
    """

    micro_group: int
    phase: Phase
    use: BufferUse
    first: int
    last: int
    slot: int

    @property
    def title(self) -> str:
        """The name that is printed for it: "gather send", "gather recv", "gathered", ..."""
        return str(self.use) if self.use is BufferUse.GATHERED else f"{self.phase} {self.use}"


@dataclass(frozen=True, eq=False)
class Step:
    """An optimizer step on its way from capture to rank program.

    Attributes:
        elementwise: from OWNED on, the tasks that need no owner. No program updates them, but buckets hold them.
        buckets: under ZeRO-1, where gradients lie when they are reduced, in the order in which they are complete.
    """

    form: Form
    optimizer: str
    machine: Machine
    templates: tuple[Template, ...]
    tasks: tuple[Task, ...]
    placed: tuple[Placed, ...] = ()
    micro_groups: tuple[MicroGroup, ...] = ()
    schedule: tuple[Event, ...] = ()
    buffers: tuple[Buffer, ...] = ()
    depth: int = 1
    elementwise: tuple[Task, ...] = ()
    buckets: tuple[Bucket, ...] = ()
    program: Any = None  # canzona_compile.ir.program.Program, from EMITTED on
    _by_name: dict[str, Task] = field(init=False, repr=False, default_factory=dict)
    _placed: dict[str, Placed] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._by_name.update((task.name, task) for task in self.tasks)
        self._placed.update((own.name, own) for own in self.placed)
        if len(self._by_name) != len(self.tasks):
            raise InvalidStep("two tasks share a name")

    def task(self, name: str) -> Task:
        return self._by_name[name]

    def find(self, name: str) -> Task | None:
        return self._by_name.get(name)

    def fetched(self, group: MicroGroup) -> list[Storage]:
        """How those leaves of a micro-group are stored that are stored in another way than steps need them."""
        cuts = (self._placed[name] for name in {self.task(task).placed for task in group.tasks})
        return [cut.stored[name] for cut in cuts for name in cut.opened]

    def grid_of(self, group: MicroGroup) -> Grid:
        """The grid that the tasks of a micro-group share."""
        return self.task(group.tasks[0]).layout.grid

    def owned(self, tasks: Iterable[Task]) -> Step:
        """The step of form OWNED whose tasks are these, which have owners; all others are elementwise."""
        kept = {task.name: task for task in tasks}
        rest = tuple(task for task in self.tasks if task.name not in kept)
        return replace(self, form=Form.OWNED, tasks=tuple(kept.values()), elementwise=rest)

    def placed_of(self, task: Task) -> Placed:
        return self._placed[task.placed]

    def variants(self) -> dict[Placed, tuple[Placed, ...]]:
        """For every cut, all cuts of the same family for the same kind of layout."""
        found: dict[tuple[str, LayoutKind], list[Placed]] = {}
        for p in self.placed:
            found.setdefault((p.template.family or p.name, p.kind), []).append(p)
        return {p: tuple(found[p.template.family or p.name, p.kind]) for p in self.placed}

    def holistic_tasks(self) -> list[Task]:
        """The tasks that need whole matrices, each with the cut of its most costly variant; from PLACED on."""

        def weight(cut: Placed) -> tuple[bool, int]:
            return not cut.elementwise, cut.flops

        heaviest = {own.name: max(cuts, key=weight) for own, cuts in self.variants().items()}
        return [
            replace(task, placed=cut.name, template=cut.template.name)
            for task in self.tasks
            if not (cut := heaviest[task.placed]).elementwise
        ]

    def template_of(self, task: Task) -> Template:
        return next(t for t in self.templates if t.name == task.template)
