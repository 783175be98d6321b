"""Pick the rank that computes each matrix."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from canzona_compile.cost import GroupLoad, pipeline_seconds, rates_of
from canzona_compile.heaviest import holistic_tasks
from canzona_compile.ir import Form, Placed, Step, Strategy, Task
from canzona_compile.layout import Grid
from canzona_compile.ownership.jobs import Job, Planner
from canzona_compile.ownership.lpt import Joint

Ranks = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AssignOwners:
    """Give every task one owner, as a planner says, or let every rank compute it.

    The cost of a task is the FLOPs of its compute graph on the whole matrix, cubic terms included. Planners depend
    on costs, sizes and order alone, so that every rank finds the same plan without talking. Larger grids come first;
    a smaller one inside of them, of experts for one, sees what its ranks have to do there. Of grids that overlap
    otherwise a rank may know only one, so they do not see each other.

    A task that has variants is owned, and weighed, by its heaviest one.

    Elementwise tasks leave the step here: they need no owner and no communication, the optimizer's own
    step updates their fragments.
    """

    strategy: str = "auto"
    planner: Planner = field(default_factory=Joint)

    name: ClassVar[str] = "assign-owners"
    requires: ClassVar[Form] = Form.PLACED
    ensures: ClassVar[Form] = Form.OWNED

    def __call__(self, step: Step) -> Step:
        placed = {p.name: p for p in step.placed}
        tasks = holistic_tasks(step)
        grids: dict[Grid, list[Task]] = defaultdict(list)
        for task in tasks:
            grids[task.layout.grid].append(task)
        load: dict[Ranks, dict[int, float]] = {}
        owned: dict[str, Task] = {}
        for grid in sorted(grids, key=lambda g: (-g.size, g.members(), str(g))):
            share = grids[grid]
            if grid.size == 1:
                chosen = [replace(t, owner=(0, 0), strategy=Strategy.LOCAL, reason="whole on its rank") for t in share]
            elif self.strategy != "owner" and (reason := self._replicate(share, grid, placed, step)):
                chosen = [replace(t, owner=None, strategy=Strategy.REPLICATED, reason=reason) for t in share]
                count(load, chosen, grid, placed)
            else:
                chosen = self._own(share, grid, placed, load)
                count(load, chosen, grid, placed)
            owned.update((t.name, t) for t in chosen)
        return replace(step, form=Form.OWNED, tasks=tuple(owned[t.name] for t in tasks))

    def _own(
        self, tasks: list[Task], grid: Grid, placed: dict[str, Placed], load: dict[Ranks, dict[int, float]]
    ) -> list[Task]:
        members = set(grid.members())
        seen: dict[int, float] = defaultdict(float)
        for ranks, own in load.items():
            if members <= set(ranks):
                for rank, flops in own.items():
                    seen[rank] += flops
        start = {
            (r, s): seen[rank] for r, row in enumerate(grid.ranks) for s, rank in enumerate(row) if rank in seen
        }
        jobs = [
            Job(t.name, t.index, float(placed[t.placed].flops), math.prod(t.shape) // grid.shards) for t in tasks
        ]
        owners = self.planner(jobs, grid.replicas, grid.shards, start)
        reason = f"by {self.planner.name}"
        return [
            replace(t, owner=owner, strategy=Strategy.OWNER, reason=reason)
            for t, owner in zip(tasks, owners, strict=True)
        ]

    def _replicate(self, tasks: list[Task], grid: Grid, placed: dict[str, Placed], step: Step) -> str:
        """Why every rank of a grid should compute all of `tasks`; empty if one owner each is better."""
        if self.strategy == "replicated":
            return "asked for"
        rates = rates_of(step.machine, grid.members())
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


def count(load: dict[Ranks, dict[int, float]], tasks: Sequence[Task], grid: Grid, placed: dict[str, Placed]) -> None:
    """Add what tasks cost to the load of their grid's ranks."""
    own = load.setdefault(grid.members(), defaultdict(float))
    for task in tasks:
        flops = placed[task.placed].flops
        for rank in grid.members() if task.owner is None else (grid.ranks[task.owner[0]][task.owner[1]],):
            own[rank] += flops
