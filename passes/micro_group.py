"""Decide which tasks travel together."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from canzona_compile.analysis.step_time import (
    GridLoad,
    busiest,
    load_by_owner,
    load_of,
    pipeline_seconds,
    rates_of,
    shared_launches,
    weights,
)
from canzona_compile.ir.layout import Grid
from canzona_compile.ir.step import Form, MicroGroup, Placed, Step, Task
from canzona_compile.lowering.elementwise_kernels import opened_by_kernels
from canzona_compile.lowering.stacking import stacks
from canzona_compile.lowering.symmetric_products import rewritten
from canzona_compile.machine.hardware import Machine

TOLERANCE = 0.01  # fraction of the predicted time that the pass may give up to save memory
COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # numbers of micro-groups that the pass tries


@dataclass(frozen=True, slots=True)
class FormMicroGroups:
    """Bin the tasks of each grid into micro-groups: sort by cost, greedy with rollback.

    A micro-group grows until its makespan (FLOPs of its busiest owner) or its bytes (gathered to one owner) exceed
    a limit; then its last task moves to the next micro-group. The caller's `capacity` limits the bytes. The limit
    of the makespan follows from the number of micro-groups: the pass tries several numbers and predicts the time of
    each (`pipeline_seconds`), launches with it: matrices alike share theirs within a micro-group. On CUDA it also
    counts that products of small matrices are faster as a stack, and also tries to sort matrices that cost the same
    by their kind, which gives fewer and larger stacks. It keeps those of the shortest time, or within 1% of it if
    nothing is sent, or if communication overlaps computation. Of these it takes the one that holds the fewest bytes
    at once; on a tie, the smaller number. Where communication and computation share the cores, that is one
    micro-group. A GPU that sends nothing computes all of them one after the other, so there only plans with the
    fewest stacks count, unless steps open stored state. A matrix that alone exceeds the capacity is the only one
    that its owner has in its micro-group.

    The algorithm is Algorithm 2 of Canzona (arXiv 2602.06079), with owners fixed beforehand.

    Attributes:
        capacity: the most bytes that a micro-group gathers to one rank.
        agreed: by the global ranks of a grid, the capacity that they have instead.
        groups: how many micro-groups a grid should have; if None, the prediction decides.
        exact: whether the step uses exact numerics, which decides what can be stacked.
    """

    capacity: int
    groups: int | None = None
    depth: int = 2
    exact: bool = True
    agreed: tuple[tuple[tuple[int, ...], int], ...] = ()

    name: ClassVar[str] = "micro-group"
    requires: ClassVar[Form] = Form.OWNED
    ensures: ClassVar[Form] = Form.GROUPED

    def __call__(self, step: Step) -> Step:
        placed = {p.name: p for p in step.placed}
        grids: dict[Grid, list[Task]] = defaultdict(list)
        for task in step.tasks:
            grids[task.layout.grid].append(task)
        # Micro-groups that communicate come first, so that local work never delays a collective.
        order = sorted(grids, key=lambda g: (g.size == 1, g.members(), str(g)))
        bins: list[list[Task]] = []
        for grid in order:
            tasks = sorted(grids[grid], key=lambda t: (-placed[t.placed].flops, t.index))
            bins += self._best(tasks, grid, placed, step)
        groups = tuple(MicroGroup(i, tuple(t.name for t in own)) for i, own in enumerate(bins))
        return replace(step, form=Form.GROUPED, micro_groups=groups)

    def _best(self, tasks: Sequence[Task], grid: Grid, placed: dict[str, Placed], step: Step) -> list[list[Task]]:
        total, largest = makespan(tasks, placed), max(placed[t.placed].flops for t in tasks)
        counts = (self.groups,) if self.groups else COUNTS
        orders = [tasks]
        if step.machine.device != "cpu":  # where a stack fills processors that one product leaves idle
            orders.append(sorted(tasks, key=lambda t: (-placed[t.placed].flops, t.placed, t.index)))
        capacity = dict(self.agreed).get(grid.members(), self.capacity)
        limits = [max(math.ceil(total / count), largest) for count in counts]
        plans = [pack(order, placed, limit, capacity) for limit in limits for order in orders]
        cuts = {t.placed for t in tasks}
        alone = grid.size == 1 and step.machine.device != "cpu"
        if alone and not any(whole_while_open(placed[name]) for name in cuts):
            fewest = min(map(stacks_of, plans))
            plans = [plan for plan in plans if stacks_of(plan) == fewest]
        rates, machine = rates_of(step.machine, grid.members()), step.machine
        computed = {n: with_own_products(placed[n], machine) for n in cuts}
        shared = {
            n: shared_launches(cut, machine, stacks(cut, machine, self.exact), aside=self.depth > 1)
            for n, cut in computed.items()
        }

        def seconds(plan: list[list[Task]]) -> float:
            loads = [load_of(own, grid, placed, shared, rates) for own in plan]
            return round(pipeline_seconds(loads, rates, self.depth), 12)  # a tie is a tie, whatever the order of sums

        times = [seconds(plan) for plan in plans]
        limit = min(times) * (1 + TOLERANCE * (rates.overlap > 0 or grid.size == 1))
        near = [plan for plan, time in zip(plans, times, strict=True) if time <= limit]
        return min(near, key=lambda plan: (live_bytes(plan, placed, self.depth), len(plan)))


def whole_while_open(placed: Placed) -> bool:
    """Whether memory for stored state grows with a micro-group: kernels open 16 bits element by element."""
    found = opened_by_kernels(placed, ())
    return any(found.get(name) != "bfloat16" for name in placed.opened)


def stacks_of(plan: Sequence[Sequence[Task]]) -> int:
    """How many stacks compute a plan of one rank."""
    return sum(len({(task.placed, task.param_group) for task in group}) for group in plan)


def with_own_products(placed: Placed, machine: Machine) -> Placed:
    """A cut as `symmetry` will leave it: on CUDA our own products decide what is stacked."""
    if machine.device != "cuda" or placed.template.interpreted:
        return placed
    return replace(placed, compute=rewritten(placed.compute))


def pack(tasks: Sequence[Task], placed: dict[str, Placed], most_flops: int, most_bytes: int) -> list[list[Task]]:
    """Cut tasks into consecutive micro-groups, each as long as its makespan and bytes are within the limits."""
    bins: list[list[Task]] = []
    known = weights(tasks, placed)
    load = GridLoad(known)
    for task in tasks:
        flops, size = load.with_(task)
        if not bins or flops > most_flops or size > most_bytes:  # the task begins the next group
            bins.append([])
            load = GridLoad(known)
        bins[-1].append(task)
        load.add(task.owner, task.placed)
    return bins


def live_bytes(plan: Sequence[Sequence[Task]], placed: Mapping[str, Placed], depth: int) -> int:
    """The most bytes that a rank holds for `depth` micro-groups in flight: received, assembled, and sent back."""
    loads = [load_by_owner(own, placed) for own in plan]
    held = [2 * busiest(load.up) + 2 * busiest(load.down) for load in loads]
    return max(sum(held[i : i + depth]) for i in range(len(held)))


def makespan(tasks: Sequence[Task], placed: dict[str, Placed]) -> int:
    """The FLOPs of the busiest rank."""
    return busiest(load_by_owner(tasks, placed).flops)
