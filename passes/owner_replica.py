"""Let only the owner's replica apply updates, as frameworks with ZeRO-1 do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

from canzona_compile.ir.layout import Grid, Layout, LayoutKind
from canzona_compile.ir.step import Form, Placed, Step, Strategy, Task


@dataclass(frozen=True, slots=True)
class OwnerReplica:
    """Move every owned task to the grid of its owner's replica. The other replicas then neither gather nor apply.

    The other replicas would get the new parameters in the next forward pass. Forecasts of `updates="zero1"` use such
    steps; the runtime does not execute them yet.
    """

    name: ClassVar[str] = "owner-replica"
    requires: ClassVar[Form] = Form.OWNED
    ensures: ClassVar[Form] = Form.OWNED

    def __call__(self, step: Step) -> Step:
        cuts = {p.name: p for p in step.placed}
        tasks, wanted = [], set()
        for task in alone(step.tasks):
            cut = cuts[task.placed]
            if cut.kind.replicated and task.layout.grid.replicas == 1:
                cut = without_replicas(cut)
            tasks.append(replace(task, placed=cut.name))
            wanted.add(family(cut))
        both = (c for p in step.placed for c in ((p, without_replicas(p)) if p.kind.replicated else (p,)))
        return replace(step, tasks=tuple(tasks), placed=tuple(c for c in both if family(c) in wanted))


def alone(tasks: Iterable[Task]) -> tuple[Task, ...]:
    """Tasks on the grid of their owner's replica; those that every rank computes stay as they are."""
    layouts: dict[tuple[int, int], Layout] = {}

    def moved(task: Task) -> Task:
        if task.owner is None or task.layout.grid.replicas == 1:
            return task
        key = (id(task.layout), task.owner[0])
        if key not in layouts:
            layouts[key] = replace(task.layout, grid=Grid((task.layout.grid.ranks[task.owner[0]],)))
        strategy = Strategy.LOCAL if layouts[key].grid.size == 1 else task.strategy
        return replace(task, layout=layouts[key], owner=(0, task.owner[1]), strategy=strategy)

    return tuple(map(moved, tasks))


def without_replicas(cut: Placed) -> Placed:
    """The same cut for a layout that has no replicas."""
    return replace(cut, name=f"{cut.name}_on_owner_replica", kind=replace(cut.kind, replicated=False))


def family(cut: Placed) -> tuple[str, LayoutKind]:
    """A key that is equal for cuts that are variants of one step, see `Step.variants`."""
    return cut.template.family or cut.name, cut.kind
