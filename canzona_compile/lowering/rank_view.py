"""A micro-group as one rank sees it: its coordinate, its segments, and where pieces lie in buffers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import fx

from canzona_compile.ir.layout import Box, Grid
from canzona_compile.ir.program import View
from canzona_compile.ir.step import Batch, Exchange, MicroGroup, Phase, Piece, Placed, Step, Task, Wire

Coordinate = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Segment:
    """Tasks of a group that share graphs and numbers, with fragments on this rank.

    `near`: their gather runs in this rank's replica. `empty`: their fragments have no elements here; they
    are there for the counters, 0-d tensors of the state that every rank keeps.
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
    """A micro-group as one rank sees it: its coordinate, its segments, and where pieces lie in buffers."""

    def __init__(self, step: Step, group: MicroGroup, rank: int) -> None:
        self.step, self.group = step, group
        self.tasks = [step.task(name) for name in group.tasks]
        self.grid: Grid = self.tasks[0].layout.grid
        self.at: Coordinate = self.grid.find(rank)
        self.slot = {b.use: b.slot for b in step.buffers if b.group == group.index}
        self.wires: dict[tuple[int, str], fx.Node] = {}  # prepared wires and kept values, by segment
        self.results: dict[str, tuple[Batch, tuple[fx.Node, ...]]] = {}  # computed values, by task
        self.work: dict[Phase, fx.Node] = {}
        self.commits: list[tuple[fx.Node, fx.Node, torch.dtype, torch.dtype]] = []  # target, value, their dtypes
        self.gathered = 0  # bytes of whole values that have been laid out

    @cached_property
    def segments(self) -> list[Segment]:
        found: dict[tuple[str, int, bool, bool], list[Task]] = {}
        for task in sorted(self.tasks, key=lambda t: t.index):
            near = task.owner is None or task.owner[0] == self.at[0]
            empty = not task.layout.boxes[self.at[1]].numel and bool(self.group.exchanges)
            if not empty or self.step.placed_of(task).counts:
                found.setdefault((task.placed, task.group, near, empty), []).append(task)
        return [
            Segment(self.step.placed_of(own[0]), group, near, empty, tuple(own))
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
        return {e.phase: e for e in self.group.exchanges}

    @cached_property
    def _blocks(self) -> dict[tuple[Phase, bool], list[tuple[int, tuple[Piece, ...], int]]]:
        """By phase and direction (True: sent): start, pieces and size of every peer's block."""
        found: dict[tuple[Phase, bool], list[tuple[int, tuple[Piece, ...], int]]] = {}
        for phase, exchange in self.exchanges.items():
            for sent in (True, False):
                start, blocks = 0, []
                for peer in self.peers(phase):
                    pieces, size = exchange.block(self.at, peer) if sent else exchange.block(peer, self.at)
                    blocks.append((start, pieces, size))
                    start += size
                found[phase, sent] = blocks
        return found

    def byte_counts(self, phase: Phase, sent: bool) -> tuple[int, ...]:
        return tuple(size for _, _, size in self._blocks[phase, sent])

    @cached_property
    def _places(self) -> dict[tuple[Phase, bool], dict[tuple[str, str], list[tuple[int, Box]]]]:
        places: dict[tuple[Phase, bool], dict[tuple[str, str], list[tuple[int, Box]]]] = {}
        for key, blocks in self._blocks.items():
            own = places.setdefault(key, {})
            for start, pieces, _ in blocks:
                for piece in pieces:
                    own.setdefault((piece.task, piece.wire.name), []).append((start + piece.offset, piece.box))
        return places

    def places(self, phase: Phase, sent: bool, task: str, wire: Wire) -> list[tuple[int, Box]]:
        """Byte offsets and boxes of a task's wire in the send or receive buffer of a phase."""
        return self._places[phase, sent].get((task, wire.name), [])

    def received(self, phase: Phase, task: Task, wire: Wire) -> tuple[int, Box]:
        """Where this rank's part of a wire arrives; anywhere if it has no elements."""
        places = self.places(phase, False, task.name, wire)
        return places[0] if places else (0, wire.box(task.layout.boxes[self.at[1]]))

    def view(self, phase: Phase, sent: bool, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> View:
        return View(self.slot[f"{phase.value} {'send' if sent else 'recv'}"], offset, dtype, shape)


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
