"""Give all parameters that step at once to one rank."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from canzona_compile.errors import UnsupportedOptimizer
from canzona_compile.ir.step import Form, Step, Strategy


@dataclass(frozen=True, slots=True)
class OneOwner:
    """Move every task of a coupled template to the lowest rank, if there are such tasks.

    An optimizer whose update of one parameter depends on others has only coupled templates. The rank that steps all of
    them must be able to gather all of them, so every grid has to have the same ranks.
    """

    name: ClassVar[str] = "one-owner"
    requires: ClassVar[Form] = Form.OWNED
    ensures: ClassVar[Form] = Form.OWNED

    def __call__(self, step: Step) -> Step:
        coupled = {t.name for t in step.templates if t.coupled}
        own = [task for task in step.tasks if task.template in coupled]
        if not own:
            return step
        ranks = set(own[0].layout.grid.members())
        for task in own:
            if set(task.layout.grid.members()) != ranks:
                raise UnsupportedOptimizer(
                    f"the optimizer steps all parameters at once, but this one is on ranks "
                    f"{sorted(task.layout.grid.members())} and {own[0].name} on {sorted(ranks)}",
                    at=task.name,
                    hint="put all parameters on one mesh, or use one optimizer per mesh",
                )
        first = min(ranks)
        reason = "the owner of all parameters, which step at once"
        moved = {
            task.name: replace(
                task,
                owner=task.layout.grid.find(first),
                strategy=Strategy.OWNER if len(ranks) > 1 else Strategy.LOCAL,
                reason=reason if len(ranks) > 1 else task.reason,
            )
            for task in own
        }
        return replace(step, tasks=tuple(moved.get(task.name, task) for task in step.tasks))
