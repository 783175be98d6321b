"""Pick the rank that computes each matrix."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import ClassVar

from canzona_compile.cost import GroupLoad, pipeline_seconds, rates_of
from canzona_compile.ir import Form, Placed, Step, Strategy, Task
from canzona_compile.layout import Grid

Load = dict[int, int]


@dataclass(frozen=True, slots=True)
class AssignOwners:
    """Give every task one owner by largest processing time first, or let every rank compute it.

    The cost of a task is the FLOPs of its compute graph on the whole matrix, cubic terms included.
    Largest first onto the least loaded rank of its grid: the busiest rank does at most 4/3 - 1/(3W) of
    the optimal load (Graham 1969). Ties go to the first parameter and the lowest rank, so that every
    rank finds the same plan without talking. Grids over the same ranks share their load.

    A task that has variants is owned, and weighed, by its heaviest one.

    Elementwise tasks leave the step here: they need no owner and no communication, the optimizer's own
    step updates their fragments.
    """

    strategy: str = "auto"

    name: ClassVar[str] = "assign-owners"
    requires: ClassVar[Form] = Form.PLACED
    ensures: ClassVar[Form] = Form.OWNED

    def __call__(self, step: Step) -> Step:
        placed = {p.name: p for p in step.placed}
        heaviest = {own.name: max(variants, key=weight) for own, variants in step.variants().items()}
        tasks = [
            replace(t, placed=most.name, template=most.template.name)
            for t in step.tasks
            if not (most := heaviest[t.placed]).elementwise
        ]
        flops = {t.name: placed[t.placed].flops for t in tasks}
        load: dict[tuple[int, ...], Load] = defaultdict(lambda: defaultdict(int))
        owned: dict[str, Task] = {}
        for task in sorted(tasks, key=lambda t: (-flops[t.name], t.index)):
            owned[task.name] = own(task, flops[task.name], load[task.layout.grid.members()])
        if self.strategy != "owner":
            for grid in sorted({t.layout.grid for t in tasks if t.layout.grid.size > 1}, key=str):
                share = [owned[t.name] for t in tasks if t.layout.grid == grid]
                reason = self._replicate(share, grid, placed, step)
                for task in share if reason else ():
                    owned[task.name] = replace(task, owner=None, strategy=Strategy.REPLICATED, reason=reason)
        return replace(step, form=Form.OWNED, tasks=tuple(owned[t.name] for t in tasks))

    def _replicate(self, tasks: list[Task], grid: Grid, placed: dict[str, Placed], step: Step) -> str:
        """Why every rank of a grid should compute all of `tasks`; empty if one owner each is better."""
        if self.strategy == "replicated":
            return "asked for"
        rates = rates_of(step.machine)
        up = sum(w.itemsize * math.prod(w.shape) for t in tasks for w in placed[t.placed].gather)
        down = sum(w.itemsize * math.prod(w.shape) for t in tasks for w in placed[t.placed].scatter)
        work = [placed[t.placed].flops for t in tasks]
        sharded, share = grid.shards > 1, 1 / grid.size
        once = GroupLoad(
            gather_bytes=up * share * sharded,
            compute_flops=max(sum(work) * share, max(work)),
            scatter_bytes=down * (share * sharded + (grid.replicas > 1) / grid.shards),
            collectives=2 * sharded + (grid.replicas > 1),
        )
        everywhere = GroupLoad(up * sharded, float(sum(work)), 0.0, int(sharded))
        owner_time = pipeline_seconds([once], rates, 1)
        replicated_time = pipeline_seconds([everywhere], rates, 1)
        if replicated_time >= owner_time:
            return ""
        return f"predicted {replicated_time * 1e3:.3g} ms everywhere, {owner_time * 1e3:.3g} ms with owners"


def weight(placed: Placed) -> tuple[bool, int]:
    return not placed.elementwise, placed.flops


def own(task: Task, flops: int, load: Load) -> Task:
    grid = task.layout.grid
    if grid.size == 1:
        return replace(task, owner=(0, 0), strategy=Strategy.LOCAL, reason="whole on its rank")
    rank = min(grid.members(), key=lambda r: (load[r], r))
    load[rank] += flops
    return replace(task, owner=grid.find(rank), strategy=Strategy.OWNER, reason="least loaded rank")
