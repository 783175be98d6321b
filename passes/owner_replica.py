"""Let only the ranks of the owner's replica update a matrix (ZeRO-1)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

from canzona_compile.ir.layout import Grid, Layout, LayoutKind
from canzona_compile.ir.step import Form, Placed, Step, Strategy, Task


@dataclass(frozen=True, slots=True)
class OwnerReplica:
    """Move every owned task to the grid of its owner's replica. The other replicas then neither gather nor apply.

    They get the new parameters from an all-gather after the step, and have sent their gradients in a reduce-scatter
    before it. Those are the collectives of `Step.buckets`.

    Attributes:
        replicas: the number of data-parallel replicas. A grid with more rows, because a tensor is replicated over other
            mesh dims as well, keeps the rows that belong to the owner's replica. None: every row is a replica.
    """

    replicas: int | None = None

    name: ClassVar[str] = "owner-replica"
    requires: ClassVar[Form] = Form.OWNED
    ensures: ClassVar[Form] = Form.OWNED

    def __call__(self, step: Step) -> Step:
        cuts = {p.name: p for p in step.placed}
        tasks, wanted = [], set()
        for task in in_own_replica(step.tasks, self.replicas):
            cut = cuts[task.placed]
            if cut.kind.replicated and task.layout.grid.replicas == 1:
                cut = without_replicas(cut)
            tasks.append(replace(task, placed=cut.name))
            wanted.add(family(cut))
        both = (c for p in step.placed for c in ((p, without_replicas(p)) if p.kind.replicated else (p,)))
        return replace(step, tasks=tuple(tasks), placed=tuple(c for c in both if family(c) in wanted))


def in_own_replica(tasks: Iterable[Task], replicas: int | None = None) -> tuple[Task, ...]:
    """Move tasks to the grid of their owner's replica; those that every rank computes stay as they are."""
    layouts: dict[tuple[int, int], Layout] = {}

    def moved(task: Task) -> Task:
        grid = task.layout.grid
        count = replicas or grid.replicas
        if task.owner is None or count == 1 or grid.replicas % count:
            return task
        rows = grid.replicas // count
        replica, row = divmod(task.owner[0], rows)
        key = (id(task.layout), replica)
        if key not in layouts:
            own = Grid(grid.ranks[replica * rows : (replica + 1) * rows])
            layouts[key] = replace(task.layout, grid=own)
        strategy = Strategy.LOCAL if layouts[key].grid.size == 1 else task.strategy
        return replace(task, layout=layouts[key], owner=(row, task.owner[1]), strategy=strategy)

    return tuple(map(moved, tasks))


def without_replicas(cut: Placed) -> Placed:
    """The same cut for a layout that has no replicas."""
    return replace(cut, name=f"{cut.name}_on_owner_replica", kind=replace(cut.kind, replicated=False))


def family(cut: Placed) -> tuple[str, LayoutKind]:
    """A key that is equal for cuts that are variants of one step, see `Step.variants`."""
    return cut.template.family or cut.name, cut.kind
