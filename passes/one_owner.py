"""Give parameters that step together to one rank."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from canzona_compile.errors import UnsupportedOptimizer
from canzona_compile.ir.step import Form, Step, Strategy, Task


@dataclass(frozen=True, slots=True)
class OneOwner:
    """Move the tasks of each cell of coupled parameters to one rank, if there are such tasks.

    Parameters of one optimizer step together: all of them, or those of each parameter group. An optimizer whose update
    of one parameter depends on others has only such templates. Each rank is shown what a step leaves beside parameters,
    so every grid has to have the same ranks. A model goes to the lowest of them; groups go, the largest first, to the
    rank that has the fewest elements so far.
    """

    name: ClassVar[str] = "one-owner"
    requires: ClassVar[Form] = Form.OWNED
    ensures: ClassVar[Form] = Form.OWNED

    def __call__(self, step: Step) -> Step:
        coupled = {t.name: t.coupled for t in step.templates if t.coupled}
        cells: defaultdict[Hashable, list[Task]] = defaultdict(list)
        for task in step.tasks:
            if task.template in coupled:
                cells[task.param_group if coupled[task.template] == "group" else None].append(task)
        if not cells:
            return step
        ranks = same_ranks([task for own in cells.values() for task in own])
        owners = owners_of(cells, ranks)
        moved: dict[str, Task] = {}
        for cell, tasks in cells.items():
            what = "all parameters" if cell is None else "the parameters of this group"
            for task in tasks:
                moved[task.name] = replace(
                    task,
                    owner=task.layout.grid.find(owners[cell]),
                    strategy=Strategy.OWNER if len(ranks) > 1 else Strategy.LOCAL,
                    reason=f"the owner of {what}, which step at once" if len(ranks) > 1 else task.reason,
                )
        return replace(step, tasks=tuple(moved.get(task.name, task) for task in step.tasks))


def same_ranks(tasks: Sequence[Task]) -> list[int]:
    """Return the ranks on which all tasks lie, in ascending order.

    Raises:
        UnsupportedOptimizer: they lie on different ones.
    """
    first, ranks = tasks[0], sorted(tasks[0].layout.grid.members())
    for task in tasks:
        if (own := sorted(task.layout.grid.members())) != ranks:
            raise UnsupportedOptimizer(
                f"the optimizer steps all parameters at once, but this one lies on ranks {own} and {first.name} on "
                f"{ranks}",
                at=task.name,
                hint="put all of its parameters on one mesh, or give each mesh an optimizer of its own",
            )
    return ranks


def owners_of(cells: Mapping[Hashable, Sequence[Task]], ranks: Sequence[int]) -> dict[Hashable, int]:
    """Choose the owner rank of each cell: the largest cells first, each to the rank that has the fewest elements."""
    load = dict.fromkeys(ranks, 0)
    sizes = {cell: sum(math.prod(task.shape) for task in tasks) for cell, tasks in cells.items()}
    owners: dict[Hashable, int] = {}
    for cell in sorted(sizes, key=lambda cell: -sizes[cell]):  # equal ones stay in the order of the plan
        owners[cell] = min(ranks, key=lambda rank: (load[rank], rank))
        load[owners[cell]] += sizes[cell]
    return owners
