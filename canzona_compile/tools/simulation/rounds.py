"""Operations of matrices that are worked on in rounds by a whole row of ranks, around those of a schedule.

In each round every rank of the owner's row does its part, the parts go to the owner, it computes, and what it found
goes back. Matrices are in two sets, so that one computes while the other communicates.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from canzona_compile.ir.hardware import Hardware
from canzona_compile.ir.layout import Grid, Layout
from canzona_compile.tools.simulation.engine import Collective, Operation, Part, Start, Wait, Work

SETS = 2


@dataclass(frozen=True, slots=True)
class Rounds:
    """One matrix.

    Attributes:
        before, after: seconds of elementwise work on the whole matrix, once, before the first and after the last round.
        part: seconds of a rank's part, before its bytes go up and again after the answer has come down.
        owner: seconds of the owner.
        up, down: bytes from each rank to the owner, and back, in each round.
    """

    name: str
    layout: Layout
    owner_at: tuple[int, int]
    before: float
    after: float
    part: float
    owner: float
    up: int
    down: int


class RoundsPlayer:
    """Adds operations for some matrices on one grid; `begin` before a schedule's operations, `finish` after them.

    Args:
        rounds: how often parts go up and answers come down.
        group: the number that stands for these matrices among micro-groups.
        operations, collectives: of the simulation, to be added to.
    """

    def __init__(
        self,
        matrices: Sequence[Rounds],
        rounds: int,
        hardware: Hardware,
        group: int,
        operations: list[list[Operation]],
        collectives: list[Collective],
    ) -> None:
        self.rounds, self.hardware, self.group = rounds, hardware, group
        order = sorted(matrices, key=lambda m: (m.owner_at, -m.owner, m.name))
        self.sets = [own for i in range(SETS) if (own := order[i::SETS])]
        self.grid: Grid = matrices[0].layout.grid
        self.operations, self.collectives = operations, collectives
        self.sent: dict[str, int] = {"gather": 0, "scatter": 0}
        self._up: list[list[int]] = []

    def begin(self) -> None:
        """The first parts of all sets."""
        self._up = [self._start(i, 0) for i in range(len(self.sets))]

    def finish(self) -> None:
        """All that follows."""
        for number in range(self.rounds):
            down = []
            for i in range(len(self.sets)):
                self._wait(self._up[i])
                self._work(i, "compute", owner=True)
                down.append(self._send(i, "scatter", up=False))
            for i in range(len(self.sets)):
                last = number == self.rounds - 1
                self._wait(down[i])
                self._work(i, "apply", part=True, after=last)
                if not last:
                    self._up[i] = self._start(i, number + 1)

    def bytes(self) -> dict[int, int]:
        """Of buffers on each rank: its parts and answers, and on owners what all others send."""
        found: dict[int, int] = {}
        for i in range(len(self.sets)):
            for _, row, own in self._rows(i):
                both = sum(m.up + m.down for m in own)
                for s, rank in enumerate(row):
                    mine = sum(m.up for m in own if m.owner_at[1] == s)
                    found[rank] = found.get(rank, 0) + both + mine * len(row)
        return found

    def _start(self, i: int, number: int) -> list[int]:
        self._work(i, "prepare", part=True, before=number == 0)
        return self._send(i, "gather", up=True)

    def _wait(self, numbers: list[int]) -> None:
        for r, row in enumerate(self.grid.ranks):
            for rank in row:
                self.operations[rank].append(Wait(numbers[r]))

    def _rows(self, i: int) -> Iterator[tuple[int, tuple[int, ...], list[Rounds]]]:
        for r, row in enumerate(self.grid.ranks):
            yield r, row, [m for m in self.sets[i] if m.owner_at[0] == r]

    def _work(
        self,
        i: int,
        act: str,
        *,
        part: bool = False,
        owner: bool = False,
        before: bool = False,
        after: bool = False,
    ) -> None:
        shards = self.grid.shards
        for _, row, own in self._rows(i):
            for s, rank in enumerate(row):
                mine = [m for m in own if m.owner_at[1] == s]
                seconds = sum(m.part for m in own) * part + sum(m.owner for m in mine) * owner
                seconds += sum(m.before for m in own) / shards * before + sum(m.after for m in own) / shards * after
                if owner:  # adding up what came
                    seconds += sum(m.up for m in mine) * shards / self.hardware.bandwidth
                names = tuple(m.name for m in (mine if owner else own))
                self.operations[rank].append(Work(act, self.group, seconds, names if act == "compute" else ()))

    def _send(self, i: int, act: str, *, up: bool) -> list[int]:
        numbers = []
        for _, row, own in self._rows(i):
            nodes = np.array(row) // self.hardware.ranks_per_node
            mates = np.array([(nodes == node).sum() - 1 for node in nodes])
            size = [m.up if up else m.down for m in own]
            pairs = list(zip(size, own, strict=True))
            mine = np.array([sum(n for n, m in pairs if m.owner_at[1] == s) for s in range(len(row))])
            # A rank exchanges with each owner of its row; what it owns itself it exchanges with all others.
            near = np.array([mine[nodes == node].sum() for node in nodes]) - mine
            far = mine.sum() - mine - near
            others = len(row) - 1 - mates
            node = np.maximum(near, mine * mates) / self.hardware.node.bandwidth
            network = np.maximum(far, mine * others) / self.hardware.network.bandwidth
            sent = (near + far) if up else mine * (len(row) - 1)
            parts = tuple(Part(*triple) for triple in zip(node.tolist(), network.tolist(), sent.tolist(), strict=True))
            link = self.hardware.link(row)
            latency = link.latency + link.per_peer * (len(row) - 1)
            self.collectives.append(Collective(act, self.group, row, parts, latency))
            numbers.append(len(self.collectives) - 1)
            self.sent[act] += int(sent.sum())
            for rank in row:
                self.operations[rank].append(Start(numbers[-1]))
        return numbers
