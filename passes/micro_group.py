"""Which tasks travel together."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from canzona_compile.analysis.flops import GroupLoad, pipeline_seconds, rates_of
from canzona_compile.ir.layout import Grid
from canzona_compile.ir.step import Form, MicroGroup, Placed, Step, Task, Wire

TOLERANCE = 0.01  # of predicted time, given up for memory
COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


@dataclass(frozen=True, slots=True)
class FormMicroGroups:
    """Bin the tasks of each grid into micro-groups: sort by cost, greedy with rollback.

    A group grows until its makespan (FLOPs of its busiest owner) or its bytes (gathered to one owner) exceed the
    capacity; then the last task is rolled back into the next group. The bytes are the caller's capacity. The
    makespan follows from a model of the pipeline: of several group counts those are left whose predicted time is the
    shortest, or within 1% of it where communication overlaps computation; of these the one that holds the fewest
    bytes at once is taken, and the smaller count on a tie. Where they share the cores, that is one group. An owner
    gets a matrix larger than the capacity as its only one of a group.

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

        times = [seconds(plan) for plan in plans]
        limit = min(times) * (1 + TOLERANCE * rates.overlap)
        near = [plan for plan, time in zip(plans, times, strict=True) if time <= limit]
        return min(near, key=lambda plan: (live_bytes(plan, placed, self.depth), len(plan)))


@dataclass(frozen=True, slots=True)
class Weight:
    """What one task asks of the rank that computes it: FLOPs, and bytes to it and from it."""

    flops: int
    up: int
    down: int


def weights(tasks: Sequence[Task], placed: Mapping[str, Placed]) -> dict[str, Weight]:
    """By name of a cut."""
    own = (placed[name] for name in {task.placed for task in tasks})
    return {p.name: Weight(p.flops, gathered_bytes(p), size_of(p.scatter)) for p in own}


class Load:
    """What tasks ask of the ranks of their grid: by owner, and of every rank (None)."""

    def __init__(self, known: Mapping[str, Weight]) -> None:
        self.known = known
        self.flops: dict[object, int] = {None: 0}
        self.up: dict[object, int] = {None: 0}
        self.down: dict[object, int] = {None: 0}

    def add(self, task: Task) -> None:
        weight, owner = self.known[task.placed], task.owner
        self.flops[owner] = self.flops.get(owner, 0) + weight.flops
        self.up[owner] = self.up.get(owner, 0) + weight.up
        self.down[owner] = self.down.get(owner, 0) + weight.down

    def with_(self, task: Task) -> tuple[int, int]:
        """FLOPs and bytes gathered of the busiest rank that computes `task`, if it is added."""
        weight, owner = self.known[task.placed], task.owner
        if owner is None:
            return most(self.flops) + weight.flops, most(self.up) + weight.up
        flops, up = self.flops.get(owner, 0), self.up.get(owner, 0)
        return flops + self.flops[None] + weight.flops, up + self.up[None] + weight.up


def most(by_owner: Mapping[object, int]) -> int:
    """Of the busiest rank."""
    return max((n for owner, n in by_owner.items() if owner is not None), default=0) + by_owner[None]


def pack(tasks: Sequence[Task], placed: dict[str, Placed], most_flops: int, most_bytes: int) -> list[list[Task]]:
    """Consecutive groups, each the longest whose makespan and bytes are within the limits."""
    bins: list[list[Task]] = []
    known = weights(tasks, placed)
    load = Load(known)
    for task in tasks:
        flops, size = load.with_(task)
        if not bins or flops > most_flops or size > most_bytes:  # rolled back into the next group
            bins.append([])
            load = Load(known)
        bins[-1].append(task)
        load.add(task)
    return bins


def live_bytes(plan: Sequence[Sequence[Task]], placed: Mapping[str, Placed], depth: int) -> int:
    """Most bytes that a rank holds for the groups in flight: received, assembled, and the same on the way back."""
    loads = [load_by_owner(own, placed) for own in plan]
    held = [2 * most(load.up) + 2 * most(load.down) for load in loads]
    return max(sum(held[i : i + depth]) for i in range(len(held)))


def makespan(tasks: Sequence[Task], placed: dict[str, Placed]) -> int:
    return most(load_by_owner(tasks, placed).flops)


def load_by_owner(tasks: Sequence[Task], placed: Mapping[str, Placed]) -> Load:
    load = Load(weights(tasks, placed))
    for task in tasks:
        load.add(task)
    return load


def gathered_bytes(placed: Placed) -> int:
    return size_of(placed.gather)


def size_of(wires: Sequence[Wire]) -> int:
    return sum(math.prod(w.shape) * w.itemsize for w in wires)


def load_of(tasks: Sequence[Task], grid: Grid, placed: dict[str, Placed]) -> GroupLoad:
    """Bytes per rank and FLOPs of the busiest owner of one group."""
    load = load_by_owner(tasks, placed)
    sharded, exchanged = grid.shards > 1, grid.replicas > 1
    owned = len(load.flops) > 1
    down = max((n for owner, n in load.down.items() if owner is not None), default=0)
    return GroupLoad(
        gather_bytes=most(load.up) * sharded,
        compute_flops=float(most(load.flops)),
        scatter_bytes=down * (sharded + exchanged / grid.shards),
        collectives=sharded + owned * (sharded + exchanged),
    )
