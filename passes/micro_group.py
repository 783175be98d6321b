"""Which tasks travel together."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
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


def pack(tasks: Sequence[Task], placed: dict[str, Placed], most_flops: int, most_bytes: int) -> list[list[Task]]:
    """Consecutive groups, each the longest whose makespan and bytes are within the limits."""
    bins: list[list[Task]] = []
    flops: dict[object, int] = defaultdict(int)
    size: dict[object, int] = defaultdict(int)
    for task in tasks:
        work, need = placed[task.placed].flops, gathered_bytes(placed[task.placed])
        full = flops[task.owner] + work > most_flops or size[task.owner] + need > most_bytes
        if full or not bins:  # the task that overflows is rolled back into the next group
            bins.append([])
            flops.clear()
            size.clear()
        bins[-1].append(task)
        flops[task.owner] += work
        size[task.owner] += need
    return bins


def makespan(tasks: Sequence[Task], placed: dict[str, Placed]) -> int:
    load: dict[object, int] = defaultdict(int)
    for task in tasks:
        load[task.owner] += placed[task.placed].flops
    return max(load.values())


def gathered_bytes(placed: Placed) -> int:
    return sum(math.prod(w.shape) * w.itemsize for w in placed.gather)


def load_of(tasks: Sequence[Task], grid: Grid, placed: dict[str, Placed]) -> GroupLoad:
    """Bytes per rank and FLOPs of the busiest owner of one group."""
    up: dict[object, int] = defaultdict(int)
    down: dict[object, int] = defaultdict(int)
    for task in tasks:
        up[task.owner] += gathered_bytes(placed[task.placed])
        down[task.owner] += sum(math.prod(w.shape) * w.itemsize for w in placed[task.placed].scatter)
    sharded, exchanged = grid.shards > 1, grid.replicas > 1
    owned = tasks[0].owner is not None
    return GroupLoad(
        gather_bytes=max(up.values()) * sharded,
        compute_flops=float(makespan(tasks, placed)),
        scatter_bytes=max(down.values()) * owned * (sharded + exchanged / grid.shards),
        collectives=sharded + owned * (sharded + exchanged),
    )
