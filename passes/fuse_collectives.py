"""One all-to-all per micro-group and direction, instead of one collective per matrix."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

from canzona_compile.ir.step import Exchange, Form, Item, MicroGroup, Phase, Placed, Step, Task, Wire


@dataclass(frozen=True, slots=True)
class FuseCollectives:
    """Route every wire value of a micro-group through fused exchanges.

    A grid with shards gathers before compute and scatters after it, inside the owner's replica. A grid with replicas
    then exchanges the fragments of the update among replicas, shard by shard. Tasks that every rank computes are
    gathered only. The splits are uneven and exact, so they need no padding.
    """

    name: ClassVar[str] = "fuse-collectives"
    requires: ClassVar[Form] = Form.GROUPED
    ensures: ClassVar[Form] = Form.ROUTED

    def __call__(self, step: Step) -> Step:
        return replace(step, form=Form.ROUTED, micro_groups=tuple(route(step, group) for group in step.micro_groups))


def route(step: Step, group: MicroGroup) -> MicroGroup:
    placed = {p.name: p for p in step.placed}
    tasks = [step.task(name) for name in group.tasks]
    grid = tasks[0].layout.grid
    owned = [t for t in tasks if t.owner is not None]
    sharded, replicated = grid.shards > 1, grid.replicas > 1
    return replace(
        group,
        gather=exchange(Phase.GATHER, tasks, placed) if sharded else None,
        scatter=exchange(Phase.SCATTER, owned, placed) if sharded else None,
        exchange=exchange(Phase.EXCHANGE, owned, placed) if replicated else None,
    )


def exchange(phase: Phase, tasks: Iterable[Task], placed: dict[str, Placed]) -> Exchange | None:
    order = {name: i for i, name in enumerate(placed)}
    items: list[tuple[tuple[int, ...], Item]] = []
    for task in tasks:
        own = placed[task.placed]
        wires: tuple[Wire, ...] = own.gather if phase is Phase.GATHER else own.scatter
        for i, wire in enumerate(wires):
            key = (-wire.itemsize, order[task.placed], task.param_group, i, task.index)
            items.append((key, Item(task.name, wire, task.owner, task.layout.boxes)))
    items.sort(key=lambda pair: pair[0])
    return Exchange(phase, tuple(item for _, item in items)) if items else None
