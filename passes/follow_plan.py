"""Owners and micro-groups as a plan file says, instead of new ones."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from canzona_compile.errors import CanzonaError
from canzona_compile.ir.plan_file import PlanFile
from canzona_compile.ir.step import Form, MicroGroup, Step, Strategy


@dataclass(frozen=True, slots=True)
class FollowOwners:
    """Own every task as planned.

    Raises:
        CanzonaError: the plan is for other parameters or layouts, or by a strategy that is not executed.
    """

    plan: PlanFile

    name: ClassVar[str] = "follow-owners"
    requires: ClassVar[Form] = Form.PLACED
    ensures: ClassVar[Form] = Form.OWNED

    def __call__(self, step: Step) -> Step:
        tasks = []
        for task in step.holistic_tasks():
            planned = self.plan.task(task)
            tasks.append(replace(task, owner=planned.owner, strategy=Strategy(planned.strategy), reason=planned.reason))
        self.plan.check_complete(task.name for task in tasks)
        return replace(step, form=Form.OWNED, tasks=tuple(tasks))


@dataclass(frozen=True, slots=True)
class FollowGroups:
    """Group the tasks that take part as planned; groups of which none does are left out."""

    plan: PlanFile

    name: ClassVar[str] = "follow-groups"
    requires: ClassVar[Form] = Form.OWNED
    ensures: ClassVar[Form] = Form.GROUPED

    def __call__(self, step: Step) -> Step:
        present = {task.name for task in step.tasks}
        found = [kept for names in self.plan.groups if (kept := tuple(n for n in names if n in present))]
        if lost := present - {name for names in found for name in names}:
            raise CanzonaError("the plan has it in no micro-group", at=min(lost))
        return replace(step, form=Form.GROUPED, groups=tuple(MicroGroup(i, names) for i, names in enumerate(found)))
