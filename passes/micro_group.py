"""Which tasks travel together."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from canzona_compile.cost import GroupLoad, pipeline_seconds, rates_of
from canzona_compile.ir import Form, MicroGroup, Placed, Step, Task
from canzona_compile.layout import Grid

COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


@dataclass(frozen=True, slots=True)
class FormMicroGroups:
    """Bin the tasks of each grid into micro-groups: sort by cost, greedy with rollback.

    A group grows until its makespan (FLOPs of its busiest owner) or its bytes (gathered to one owner)
    exceed the capacity; then the last task is rolled back into the next group. The bytes are the
    caller's capacity. The makespan follows a cost: of several group counts the one with the shortest
    predicted pipeline is taken, the smaller count on a tie. Where communication and computation share
    the cores, that is one group; where they overlap, several. An owner gets
    a matrix larger than the capacity as its only one of a group.

    The algorithm is Algorithm 2 of Canzona (arXiv 2602.06079), with owners fixed beforehand.
    """

    capacity: int
    groups: int | None = None
    depth: int = 2

    name: ClassVar[str] = "micro-group"
    requires: ClassVar[Form] = Form.OWNED
    ensures: ClassVar[Form] = Form.GROUPED

    def __call__(self, step: Step) -> Step:
        placed = {p.name: p for p in step.placed}
        grids: dict[Grid, list[Task]] = defaultdict(list)
        for task in step.tasks:
            grids[task.layout.grid].append(task)
        # Those that communicate come first, so that local work never delays a collective.
        order = sorted(grids, key=lambda g: (g.size == 1, g.members(), str(g)))
        bins: list[list[Task]] = []
        for grid in order:
            tasks = sorted(grids[grid], key=lambda t: (-placed[t.placed].flops, t.index))
            bins += self._best(tasks, grid, placed, step)
        groups = tuple(MicroGroup(i, tuple(t.name for t in own)) for i, own in enumerate(bins))
        return replace(step, form=Form.GROUPED, groups=groups)

    def _best(self, tasks: Sequence[Task], grid: Grid, placed: dict[str, Placed], step: Step) -> list[list[Task]]:
        total, largest = makespan(tasks, placed), max(placed[t.placed].flops for t in tasks)
        counts = (self.groups,) if self.groups else COUNTS
        plans = [pack(tasks, placed, max(math.ceil(total / count), largest), self.capacity) for count in counts]
        rates = rates_of(step.machine, grid.members())

        def seconds(plan: list[list[Task]]) -> float:
            loads = [load_of(own, grid, placed) for own in plan]
            return round(pipeline_seconds(loads, rates, self.depth), 12)  # a tie is a tie, whatever the order of sums

        return min(plans, key=lambda plan: (seconds(plan), len(plan)))


@dataclass(slots=True)
class Load:
    """What tasks ask of the ranks of their grid: by owner, and of every rank.

    Attributes:
        flops: of computing.
        up, down: bytes to and from whom computes.
    """

    flops: defaultdict[object, int] = field(default_factory=lambda: defaultdict(int))
    up: defaultdict[object, int] = field(default_factory=lambda: defaultdict(int))
    down: defaultdict[object, int] = field(default_factory=lambda: defaultdict(int))

    def add(self, task: Task, placed: Placed) -> None:
        self.flops[task.owner] += placed.flops
        self.up[task.owner] += gathered_bytes(placed)
        self.down[task.owner] += sum(math.prod(w.shape) * w.itemsize for w in placed.scatter)

    def with_(self, task: Task, placed: Placed) -> tuple[int, int]:
        """FLOPs and bytes gathered of the busiest rank that computes `task`, if it is added."""
        owners: list[object] = [*self.flops] if task.owner is None else [task.owner]
        return (
            max((self.flops.get(o, 0) for o in owners if o is not None), default=0)
            + self.flops.get(None, 0)
            + placed.flops,
            max((self.up.get(o, 0) for o in owners if o is not None), default=0)
            + self.up.get(None, 0)
            + gathered_bytes(placed),
        )

    @staticmethod
    def most(by_owner: Mapping[object, int]) -> int:
        """Of the busiest rank."""
        return max((n for o, n in by_owner.items() if o is not None), default=0) + by_owner.get(None, 0)


def pack(tasks: Sequence[Task], placed: dict[str, Placed], most_flops: int, most_bytes: int) -> list[list[Task]]:
    """Consecutive groups, each the longest whose makespan and bytes are within the limits."""
    bins: list[list[Task]] = []
    load = Load()
    for task in tasks:
        flops, size = load.with_(task, placed[task.placed])
        if not bins or flops > most_flops or size > most_bytes:  # rolled back into the next group
            bins.append([])
            load = Load()
        bins[-1].append(task)
        load.add(task, placed[task.placed])
    return bins


def makespan(tasks: Sequence[Task], placed: dict[str, Placed]) -> int:
    load = Load()
    for task in tasks:
        load.add(task, placed[task.placed])
    return Load.most(load.flops)


def gathered_bytes(placed: Placed) -> int:
    return sum(math.prod(w.shape) * w.itemsize for w in placed.gather)


def load_of(tasks: Sequence[Task], grid: Grid, placed: dict[str, Placed]) -> GroupLoad:
    """Bytes per rank and FLOPs of the busiest owner of one group."""
    load = Load()
    for task in tasks:
        load.add(task, placed[task.placed])
    sharded, exchanged = grid.shards > 1, grid.replicas > 1
    owned = any(task.owner is not None for task in tasks)
    down = max((n for o, n in load.down.items() if o is not None), default=0)
    return GroupLoad(
        gather_bytes=Load.most(load.up) * sharded,
        compute_flops=float(Load.most(load.flops)),
        scatter_bytes=down * (sharded + exchanged / grid.shards),
        collectives=sharded + owned * (sharded + exchanged),
    )
