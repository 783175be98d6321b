"""A micro-group as one rank sees it: its coordinate, its process groups, and the segments of its tasks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import fx

from canzona_compile.ir.layout import Box, Grid
from canzona_compile.ir.program import View, Views
from canzona_compile.ir.step import Batch, BufferUse, Exchange, MicroGroup, Phase, Placed, Step, Task, Wire
from canzona_compile.lowering.memory_plan import ExchangeBuffers, RankMemory

Coordinate = tuple[int, int]


@dataclass(frozen=True, slots=True)
class TaskSegment:
    """Tasks of a micro-group that share their graphs and hyperparameters and have fragments on this rank.

    Attributes:
        near: whether their gather runs in this rank's replica.
        empty: whether their fragments have no elements on this rank. Such tasks only update counters, which are 0-d
            tensors of the state that every rank keeps.
    """

    placed: Placed
    group: int
    near: bool
    empty: bool
    tasks: tuple[Task, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(t.name for t in self.tasks)


class GroupView:
    """A micro-group as one rank sees it, and the nodes that the rank's program has for it so far.

    Attributes:
        wires: prepared wires and kept values, by the index of their segment and by name.
        stacks: those wires that prepare has written into one stack.
        results: for each task, its batch and the results of the batch.
        commits: what the micro-group's apply writes into resident state: target, value, and the dtypes of both.
    """

    def __init__(self, step: Step, group: MicroGroup, rank: int, memory: RankMemory) -> None:
        self.step, self.group, self.memory = step, group, memory
        self.tasks = [step.task(name) for name in group.tasks]
        self.grid: Grid = self.tasks[0].layout.grid
        self.at: Coordinate = self.grid.find(rank)
        self.wires: dict[tuple[int, str], fx.Node] = {}
        self.stacks: dict[tuple[int, str], fx.Node] = {}
        self.results: dict[str, tuple[Batch, tuple[fx.Node, ...]]] = {}
        self.work: dict[Phase, fx.Node] = {}
        self.commits: list[tuple[fx.Node, fx.Node, torch.dtype, torch.dtype]] = []

    @cached_property
    def segments(self) -> list[TaskSegment]:
        """The tasks that have work on this rank's fragments, in the same order on all ranks."""
        found: dict[tuple[str, int, bool, bool], list[Task]] = {}
        for task in sorted(self.tasks, key=lambda t: t.index):
            near = task.owner is None or task.owner[0] == self.at[0]
            empty = not task.layout.boxes[self.at[1]].numel and Phase.GATHER in self.exchanges
            if not empty or self.step.placed_of(task).counts:
                found.setdefault((task.placed, task.param_group, near, empty), []).append(task)
        return [
            TaskSegment(self.step.placed_of(own[0]), group, near, empty, tuple(own))
            for (_, group, near, empty), own in sorted(found.items())
        ]

    def peers(self, phase: Phase) -> list[Coordinate]:
        """The coordinates of the ranks in this rank's process group for a phase, in the order of the process group."""
        r, s = self.at
        if phase is Phase.EXCHANGE:
            return [(other, s) for other in self.grid.replica_peers(s)]
        return [(r, other) for other in self.grid.shard_peers(r)]

    @cached_property
    def exchanges(self) -> dict[Phase, Exchange]:
        """The exchanges that the micro-group has, by phase."""
        return {e.phase: e for e in self.group.exchanges}

    @cached_property
    def _buffers(self) -> dict[Phase, ExchangeBuffers]:
        return {phase: ExchangeBuffers(e, self.at, self.peers(phase)) for phase, e in self.exchanges.items()}

    def byte_counts(self, phase: Phase, use: BufferUse) -> tuple[int, ...]:
        """How many bytes go to (SEND) or come from (RECEIVE) each peer of a phase, in the order of `peers`."""
        return self._buffers[phase].byte_counts(use)

    def places(self, phase: Phase, use: BufferUse, task: str, wire: Wire) -> list[tuple[int, Box]]:
        """Byte offsets and boxes of a task's wire in the send or receive buffer of a phase."""
        return self._buffers[phase].places(use, task, wire.name)

    def sends(self, phase: Phase, segment: TaskSegment, wire: Wire) -> Iterator[Views]:
        """For each place of a wire in the send buffer of a phase, the views of all tasks of a segment."""
        places = [self.places(phase, BufferUse.SEND, task.name, wire) for task in segment.tasks]
        for column in zip(*places, strict=True):
            yield Views(tuple(self.view(phase, BufferUse.SEND, at, wire.dtype, box.size) for at, box in column))

    def received(self, phase: Phase, task: Task, wire: Wire) -> tuple[int, Box]:
        """Byte offset in the receive buffer, and box, of this rank's part of a wire; 0 if it has no elements."""
        places = self.places(phase, BufferUse.RECEIVE, task.name, wire)
        return places[0] if places else (0, wire.box(task.layout.boxes[self.at[1]]))

    def view(self, phase: Phase, use: BufferUse, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> View:
        """A tensor of `shape` at a byte offset of the send or receive buffer of a phase."""
        return self.memory.view(self.group.index, phase, use, offset, dtype, shape)


def runs(places: Sequence[list[tuple[int, Box]]], itemsize: int) -> list[tuple[int, Box, int]] | None:
    """Merge the places of the wires of n tasks, if equal parts of all tasks lie side by side.

    Args:
        places: for each task, the byte offsets and boxes of its parts.
        itemsize: bytes per element.

    Returns:
        For each part, the offset of the first task, the box and n; None if the parts do not lie side by side.
    """
    columns = list(zip(*places, strict=True)) if len({len(p) for p in places}) == 1 else []
    found = []
    for column in columns:
        offset, box = column[0]
        step = box.numel * itemsize
        if any(other != (offset + i * step, box) for i, other in enumerate(column)):
            return None
        found.append((offset, box, len(column)))
    return found or None
