"""Choose the rank that computes each matrix."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from canzona_compile.analysis.flops import bytes_of_wires
from canzona_compile.analysis.step_time import GroupLoad, Rates, pipeline_seconds, rates_of, task_seconds
from canzona_compile.ir.layout import Grid
from canzona_compile.ir.step import Form, Placed, Step, Strategy, Task
from canzona_compile.ownership.jobs import Job, Planner
from canzona_compile.ownership.lpt import LptSwap

Ranks = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AssignOwners:
    """Give every task one owner, as a planner says, or let every rank compute it.

    The cost of a task is the FLOPs of its compute graph on the whole matrix, cubic terms included. Planners depend
    on costs, sizes and order alone, so that every rank finds the same plan without talking. The pass takes larger grids
    first. A smaller grid inside of one, of experts for example, sees what its ranks have to do there. Of grids that
    overlap otherwise a rank may know only one, so they do not see each other.

    A task that has variants weighs as much as its heaviest variant, which also decides who owns it.

    Elementwise tasks become `Step.elementwise`: they need no owner and no communication, because the optimizer's own
    step updates their fragments.

    Attributes:
        strategy: "owner", "replicated" or "auto", which takes what is predicted to be faster.
        planner: chooses the owners.
    """

    strategy: str = "auto"
    planner: Planner = field(default_factory=LptSwap)

    name: ClassVar[str] = "assign-owners"
    requires: ClassVar[Form] = Form.PLACED
    ensures: ClassVar[Form] = Form.OWNED

    def __call__(self, step: Step) -> Step:
        placed = {p.name: p for p in step.placed}
        tasks = step.holistic_tasks()
        grids: dict[Grid, list[Task]] = defaultdict(list)
        for task in tasks:
            grids[task.layout.grid].append(task)
        load: dict[Ranks, dict[int, float]] = {}
        owned: dict[str, Task] = {}
        for grid in sorted(grids, key=lambda g: (-g.size, g.members(), str(g))):
            share = grids[grid]
            if grid.size == 1:
                reason = "stored whole on its rank, so nothing is sent"
                chosen = [replace(t, owner=(0, 0), strategy=Strategy.LOCAL, reason=reason) for t in share]
            else:
                reasons = self._everywhere(share, grid, placed, step)
                chosen = [
                    replace(t, owner=None, strategy=Strategy.REPLICATED, reason=reasons[t.name])
                    for t in share
                    if t.name in reasons
                ]
                count(load, chosen, grid, placed)
                chosen += self._own([t for t in share if t.name not in reasons], grid, placed, load)
                count(load, [t for t in chosen if t.owner is not None], grid, placed)
            owned.update((t.name, t) for t in chosen)
        return step.owned(owned[t.name] for t in tasks)

    def _own(
        self, tasks: list[Task], grid: Grid, placed: dict[str, Placed], load: dict[Ranks, dict[int, float]]
    ) -> list[Task]:
        if not tasks:
            return []
        members = set(grid.members())
        seen: dict[int, float] = defaultdict(float)
        for ranks, own in load.items():
            if members <= set(ranks):
                for rank, flops in own.items():
                    seen[rank] += flops
        start = {(r, s): seen[rank] for r, row in enumerate(grid.ranks) for s, rank in enumerate(row) if rank in seen}
        jobs = [Job(t.name, t.index, float(placed[t.placed].flops), math.prod(t.shape) // grid.shards) for t in tasks]
        owners = self.planner(jobs, grid.replicas, grid.shards, start)
        reason = f"the planner {self.planner.name} chose the owner"
        return [
            replace(t, owner=owner, strategy=Strategy.OWNER, reason=reason)
            for t, owner in zip(tasks, owners, strict=True)
        ]

    def _everywhere(self, tasks: list[Task], grid: Grid, placed: dict[str, Placed], step: Step) -> dict[str, str]:
        """The names of the tasks that every rank of a grid should compute, each with the reason.

        Cuts are ordered by FLOPs per byte that owners would move. The method predicts the time for each prefix of that
        order computed everywhere and takes the shortest; among equals the one with more owners.
        """
        if self.strategy == "owner":
            return {}
        if self.strategy == "replicated":
            return {t.name: "asked for" for t in tasks}
        drawing = {template.name for template in step.templates if template.draws}
        tasks = [t for t in tasks if t.template not in drawing]  # each copy would get other numbers
        cuts = sorted({t.placed for t in tasks}, key=lambda name: (density(placed[name]), name))
        compute = {name: task_seconds(placed[name], step.machine, grid.members()) for name in cuts}
        rates = rates_of(step.machine, grid.members())
        times = [self._seconds(tasks, set(cuts[:i]), grid, placed, compute, rates) for i in range(len(cuts) + 1)]
        best = min(range(len(times)), key=lambda i: (times[i], i))
        reason = f"predicted {times[best] * 1e3:.3g} ms everywhere, {times[0] * 1e3:.3g} ms with owners"
        return {t.name: reason for t in tasks if t.placed in set(cuts[:best])}

    def _seconds(
        self,
        tasks: list[Task],
        everywhere: set[str],
        grid: Grid,
        placed: dict[str, Placed],
        compute: Mapping[str, float],
        rates: Rates,
    ) -> float:
        """Seconds predicted for a step in one micro-group, with perfectly balanced owners."""
        sharded, share = grid.shards > 1, 1 / grid.size
        all_, owned = [placed[t.placed] for t in tasks], [placed[t.placed] for t in tasks if t.placed not in everywhere]
        up, own_up = (sum(bytes_of_wires(p.gather) for p in some) for some in (all_, owned))
        down = sum(bytes_of_wires(p.scatter) for p in owned)
        work, own_work = sum(compute[p.name] for p in all_), [compute[p.name] for p in owned]
        busiest = work - sum(own_work) + max(sum(own_work) * share, max(own_work, default=0.0))
        across, copies = rates.sent(grid.shards), rates.sent(grid.replicas)
        load = GroupLoad(
            gather_bytes=(up - own_up + own_up * share) * sharded * across,
            compute_flops=busiest * rates.flops,
            scatter_bytes=down * (share * sharded * across + (grid.replicas > 1) * copies / grid.shards),
            collectives=sharded + bool(owned) * (sharded + (grid.replicas > 1)),
        )
        return round(pipeline_seconds([load], rates, 1), 12)  # a tie is a tie, whatever the order of sums


def density(placed: Placed) -> float:
    """FLOPs per byte that an owner would move."""
    return placed.flops / max(1, bytes_of_wires(placed.gather) + bytes_of_wires(placed.scatter))


def count(load: dict[Ranks, dict[int, float]], tasks: Sequence[Task], grid: Grid, placed: dict[str, Placed]) -> None:
    """Add what tasks cost to the load of their grid's ranks."""
    own = load.setdefault(grid.members(), defaultdict(float))
    for task in tasks:
        flops = placed[task.placed].flops
        for rank in task.ranks:
            own[rank] += flops
