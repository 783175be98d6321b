"""Take owners and micro-groups from a plan file or from another step, instead of choosing new ones."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from canzona_compile.errors import CanzonaError
from canzona_compile.ir.plan_file import PlanFile
from canzona_compile.ir.step import Form, MicroGroup, Step, Strategy


@dataclass(frozen=True, slots=True)
class FollowOwners:
    """Give every task the owner that a plan file says."""

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
        return step.owned(tasks)


@dataclass(frozen=True, slots=True)
class InheritOwners:
    """Take the owner and the strategy of every task from a step in which the same tasks have owners.

    The first step of a task runs other code than the later ones, but must run on the rank that is to hold the state.
    Under ZeRO-1 owners stay the same however often the rest is planned anew, because gradients go to them.

    Attributes:
        source: a step of form OWNED or beyond that has the tasks, by name.
    """

    source: Step

    name: ClassVar[str] = "inherit-owners"
    requires: ClassVar[Form] = Form.PLACED
    ensures: ClassVar[Form] = Form.OWNED

    def __call__(self, step: Step) -> Step:
        tasks = []
        for task in step.holistic_tasks():
            known = self.source.find(task.name)
            if known is None:
                raise CanzonaError(
                    "the update of this parameter was elementwise and now needs the whole matrix",
                    at=task.name,
                    hint="the optimizer changed its update during the run; with this sharding, it must update "
                    "matrices from the first step",
                )
            tasks.append(replace(task, owner=known.owner, strategy=known.strategy, reason=known.reason))
        return step.owned(tasks)


@dataclass(frozen=True, slots=True)
class FollowGroups:
    """Form the micro-groups of a plan file from the tasks that take part, without empty ones."""

    plan: PlanFile

    name: ClassVar[str] = "follow-groups"
    requires: ClassVar[Form] = Form.OWNED
    ensures: ClassVar[Form] = Form.GROUPED

    def __call__(self, step: Step) -> Step:
        present = {task.name for task in step.tasks}
        found = [kept for names in self.plan.groups if (kept := tuple(n for n in names if n in present))]
        if lost := present - {name for names in found for name in names}:
            raise CanzonaError("the plan has this parameter in no micro-group", at=min(lost))
        return replace(
            step, form=Form.GROUPED, micro_groups=tuple(MicroGroup(i, names) for i, names in enumerate(found))
        )
