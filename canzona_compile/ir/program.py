"""The program of one rank: a graph, and what has to be bound to its placeholders.

`emit` writes programs, the runtime executes them. A program holds no tensors: its inputs name the tensors, views
of buffers, numbers and process groups that the runtime binds to them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx

from canzona_compile.ir.layout import Shape
from canzona_compile.ir.program_ops import Index
from canzona_compile.ir.step import Event, Role


@dataclass(frozen=True, slots=True)
class View:
    """A tensor of `shape` at a byte offset of a slot, or the part of that tensor at `index`.

    Attributes:
        offset: in bytes from the start of the slot.
        dtype: the dtype of the tensor.
        shape: the shape of the tensor.
        index: the part that the view shows; None for the whole tensor.
        pitch: bytes from one entry of a stack [n, ...] to the next; None if there is no gap between them.
    """

    slot: int
    offset: int
    dtype: torch.dtype
    shape: Shape
    index: tuple[slice, ...] | None = None
    pitch: int | None = None

    @property
    def nbytes(self) -> int:
        """The bytes of the slot that the whole tensor takes, with its gaps."""
        return self.shape[0] * self.pitch if self.pitch else math.prod(self.shape) * self.dtype.itemsize

    def of(self, slots: Sequence[Tensor]) -> Tensor:
        """Make this view of slots, which are uint8 tensors [size]."""
        whole = slots[self.slot][self.offset : self.offset + self.nbytes].view(self.dtype)
        if self.pitch:
            whole = whole.view(self.shape[0], -1)[:, : math.prod(self.shape[1:])]
        whole = whole.view(self.shape)
        return whole if self.index is None else whole[self.index]

    def rows(self) -> tuple[View, ...]:
        """The entries of a stack [n, ...] as n views."""
        each = self.pitch or math.prod(self.shape[1:]) * self.dtype.itemsize
        return tuple(View(self.slot, self.offset + i * each, self.dtype, self.shape[1:]) for i in range(self.shape[0]))


@dataclass(frozen=True, slots=True)
class Fragments:
    """This rank's fragments of a leaf (parameter, gradient or state), one per task."""

    role: Role
    leaf: str
    tasks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Residents:
    """A state leaf of tasks that this rank owns: one whole tensor per task."""

    leaf: str
    tasks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ScalarInput:
    """A number that the recorder of `template` reads on this step for tasks of one label, see `Task.param_group`."""

    template: str
    param_group: int
    name: str


@dataclass(frozen=True, slots=True)
class EagerTasks:
    """Tasks for eager steps, each bound as a `program_ops.EagerTask`: its name and its context."""

    tasks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Views:
    """Views of buffers, as a list."""

    views: tuple[View, ...]


@dataclass(frozen=True, slots=True)
class Whole:
    """One view of a buffer, not in a list."""

    view: View


@dataclass(frozen=True, slots=True)
class Indices:
    """The indices of the parts of computed values that are sent or applied."""

    index: tuple[Index, ...]


@dataclass(frozen=True, slots=True)
class Bytes:
    """How many bytes go to, or come from, each rank of a process group, in the order of its ranks."""

    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Group:
    """The process group of these global ranks, ascending."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Watcher:
    """The object that waits for collectives, a `program_ops.Watch`."""


@dataclass(frozen=True, slots=True)
class StreamSet:
    """The names of the streams beside the caller's stream, and the number of events between streams."""

    names: tuple[str, ...]
    events: int


Input = Fragments | Residents | ScalarInput | EagerTasks | Views | Whole | Indices | Bytes | Group | Watcher | StreamSet


@dataclass(frozen=True, eq=False, slots=True)
class Program:
    """One rank's step.

    Attributes:
        module: takes the inputs in order and returns nothing; it writes parameters and state in place.
        inputs: the inputs, by the name of their placeholder, in order.
        slots: the size of each memory slot on this rank, in bytes.
        collectives: how many collectives this rank starts per step.
        eager: in a program with generated kernels, the cuts whose elementwise work torch runs, each with the reason.
        events: the event of the schedule that a call belongs to, by the name of its node. Calls that connect streams,
            or index a list, have none.
    """

    module: fx.GraphModule
    inputs: Mapping[str, Input]
    slots: tuple[int, ...]
    collectives: int
    eager: Mapping[str, str] = field(default_factory=dict)
    events: Mapping[str, Event] = field(default_factory=dict)
