"""What ranks that share tasks compare before a step: what changed, and the numbers that the step reads."""

from __future__ import annotations

import enum
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from canzona_compile.replica.homes import hypers
from canzona_compile.session.plan import Plan
from canzona_compile.session.variant_selection import SameCounters

Ranks = tuple[int, ...]
ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
log = logging.getLogger(__name__)


class ChangeKind(enum.Enum):
    """What a change requires before the step can run."""

    REPLAN = enum.auto()  # it requires a new plan
    PRESENCE = enum.auto()  # it requires a program for other tasks
    VARIANTS = enum.auto()  # it requires a program for other variants


@dataclass(frozen=True, slots=True)
class StepChange:
    """A change that ranks compare before they go on.

    Attributes:
        kind: what the change requires.
        text: what changed. Ranks compare it, and errors show it. Ranks that saw the same change have the same text.
    """

    kind: ChangeKind
    text: str

    @classmethod
    def replan(cls, reason: str) -> StepChange:
        """Make the change that requires a new plan, for this reason."""
        log.info("a new plan: %s", reason)
        return cls(ChangeKind.REPLAN, f"re-plan: {reason}")


class SharedNumbers:
    """The hyperparameters and counters of tasks that ranks share.

    Args:
        optimizer: the optimizer.
        plan: the plan.
    """

    def __init__(self, optimizer: Optimizer, plan: Plan) -> None:
        self.optimizer = optimizer
        shared = [task for task in plan.owned.tasks if task.layout.grid.size > 1]
        self._first: dict[Ranks, dict[int, str]] = {}  # by set of ranks and parameter group, its first task
        self._ranks_of: dict[str, Ranks] = {}
        for task in shared:
            ranks = self._ranks_of[task.name] = tuple(sorted(task.layout.grid.members()))
            self._first.setdefault(ranks, {}).setdefault(task.param_group, task.name)

    def text(self, cohorts: Sequence[SameCounters]) -> dict[Ranks, str]:
        """Describe the numbers of a step by set of ranks, one line for each parameter group and cohort."""
        groups = self.optimizer.param_groups
        found = {
            ranks: [f"the group of {name} has {described(groups[g])}" for g, name in first.items() if g < len(groups)]
            for ranks, first in self._first.items()
        }
        for cohort in cohorts:
            numbers = f"{described(cohort.scalars)} {described(cohort.counters)}"
            for name in cohort.tasks:
                if (ranks := self._ranks_of.get(name)) is not None:
                    found[ranks].append(f"{name} reads {numbers}")
                    break
        return {ranks: "\n".join(lines) for ranks, lines in found.items()}


def described(values: Any) -> str:
    """Numbers and texts by name. Reading a tensor on a device would make the host wait, so those are left out."""
    return ", ".join(
        f"{name}={told(value)}"
        for name, value in sorted(hypers(values).items())
        if not isinstance(value, Tensor) or value.device.type == "cpu"
    )


def told(value: Any) -> str:
    """One value, without what differs between processes that hold equal ones: addresses, and the order of sets."""
    if isinstance(value, Tensor):
        return str(value.tolist())
    text = repr(sorted(value, key=repr)) if isinstance(value, set | frozenset) else repr(value)
    return ADDRESS.sub("", text)
