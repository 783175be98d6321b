"""A micro-group as one rank sees it: its coordinate, its process groups, and the segments of its tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import fx

from canzona_compile.ir.layout import Box, Grid
from canzona_compile.ir.program import View
from canzona_compile.ir.step import Batch, BufferUse, Exchange, MicroGroup, Phase, Placed, Step, Task, Wire
from canzona_compile.lowering.memory_plan import ExchangeBuffers, RankMemory

Coordinate = tuple[int, int]


@dataclass(frozen=True, slots=True)
class TaskSegment:
    """Tasks of a micro-group that share graphs and numbers and have fragments on this rank.

    Attributes:
        group: position of their parameter group.
        near: whether their gather runs in this rank's replica.
        empty: whether their fragments have no elements here. Such tasks are there for the counters alone: 0-d
            tensors of the state, which every rank keeps.
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
    """A micro-group as one rank sees it, and what its program has computed of it so far.

    Args:
        step: SCHEDULED.
        rank: global; a member of the grid of the micro-group's tasks.
        memory: of the rank's program.

    Attributes:
        at: (replica, shard) coordinate of the rank.
        wires: prepared wires and kept values, by index of their segment and name.
        results: by task, its batch and what the batch computed.
        work: of the collectives that were started, by phase.
        commits: what the group's apply writes into resident state: target, value, and the dtypes of both.
    """

    def __init__(self, step: Step, group: MicroGroup, rank: int, memory: RankMemory) -> None:
        self.step, self.group, self.memory = step, group, memory
        self.tasks = [step.task(name) for name in group.tasks]
        self.grid: Grid = self.tasks[0].layout.grid
        self.at: Coordinate = self.grid.find(rank)
        self.wires: dict[tuple[int, str], fx.Node] = {}
        self.results: dict[str, tuple[Batch, tuple[fx.Node, ...]]] = {}
        self.work: dict[Phase, fx.Node] = {}
        self.commits: list[tuple[fx.Node, fx.Node, torch.dtype, torch.dtype]] = []

    @cached_property
    def segments(self) -> list[TaskSegment]:
        """The tasks that have work on this rank's fragments, in the same order on all ranks."""
        found: dict[tuple[str, int, bool, bool], list[Task]] = {}
        for task in sorted(self.tasks, key=lambda t: t.index):
            near = task.owner is None or task.owner[0] == self.at[0]
            empty = not task.layout.boxes[self.at[1]].numel and bool(self.group.exchanges)
            if not empty or self.step.placed_of(task).counts:
                found.setdefault((task.placed, task.param_group, near, empty), []).append(task)
        return [
            TaskSegment(self.step.placed_of(own[0]), group, near, empty, tuple(own))
            for (_, group, near, empty), own in sorted(found.items())
        ]

    def peers(self, phase: Phase) -> list[Coordinate]:
        """The coordinates of this rank's process group for a phase, in the group's order."""
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
        """Bytes to (SEND) or from (RECEIVE) every peer of a phase, in the order of `peers`."""
        return self._buffers[phase].byte_counts(use)

    def places(self, phase: Phase, use: BufferUse, task: str, wire: Wire) -> list[tuple[int, Box]]:
        """Byte offsets and boxes of a task's wire in the send or receive buffer of a phase."""
        return self._buffers[phase].places(use, task, wire.name)

    def received(self, phase: Phase, task: Task, wire: Wire) -> tuple[int, Box]:
        """Byte offset and box of this rank's part of a wire; any offset if the part has no elements."""
        places = self.places(phase, BufferUse.RECEIVE, task.name, wire)
        return places[0] if places else (0, wire.box(task.layout.boxes[self.at[1]]))

    def view(self, phase: Phase, use: BufferUse, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> View:
        """A tensor of `shape` at a byte offset of the send or receive buffer of a phase."""
        return self.memory.view(self.group.index, phase, use, offset, dtype, shape)


def runs(places: Sequence[list[tuple[int, Box]]], itemsize: int) -> list[tuple[int, Box, int]] | None:
    """Places of n tasks' wires as runs of n neighbours: (offset, box, n); None if they are not neighbours."""
    columns = list(zip(*places, strict=True)) if len({len(p) for p in places}) == 1 else []
    found = []
    for column in columns:
        offset, box = column[0]
        step = box.numel * itemsize
        if any(other != (offset + i * step, box) for i, other in enumerate(column)):
            return None
        found.append((offset, box, len(column)))
    return found or None
