"""The step of all parameters at once: brought to one rank, stepped there, and taken back."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from canzona_compile.capture.eager_fallback import Part
from canzona_compile.capture.joint import JointUpdate, absent, show, step_at_once, whole_copy
from canzona_compile.capture.twin import marks_of, plain_class
from canzona_compile.errors import OneRankSteps, UnsupportedOptimizer
from canzona_compile.ir.program_ops import Watch
from canzona_compile.runtime.process_groups import Groups
from canzona_compile.runtime.send_values import send_values
from canzona_compile.session.bind import BoundParam
from canzona_compile.session.plan import Plan
from canzona_compile.session.variant_selection import Lineup, Names


class JointStep:
    """Steps all parameters of an optimizer that couples them.

    A step runs two programs. The first brings parameters and gradients to the owner rank, which then steps whole copies
    with the optimizer's own code; the second takes the new parameters back.

    Args:
        optimizer: the wrapped optimizer.
        plan: the plan, in which one rank owns all tasks.
        groups: finds process groups.
        rank: this rank, global.
        watch: waits for collectives.

    Raises:
        UnsupportedOptimizer: a parameter is no whole tensor to the plan.
    """

    def __init__(self, optimizer: Optimizer, plan: Plan, groups: Groups, rank: int, watch: Watch) -> None:
        self.optimizer, self.plan, self.groups, self.watch = optimizer, plan, groups, watch
        self._brought: dict[str, Tensor] = {}
        task = plan.owned.tasks[0]
        self.ranks = task.layout.grid.members()
        self.owner = self.ranks[0] if task.owner is None else task.layout.grid.ranks[task.owner[0]][task.owner[1]]
        self.here = self.owner == rank
        first = next(iter(plan.bound.values()))
        assert first.kind.joint is not None
        self.joint: JointUpdate = first.kind.joint
        self.device = first.param.device
        check_whole(plan.bound)
        if self.here and len(self.ranks) > 1:
            size = sum(math.prod(t.shape) * first.param.element_size() for t in plan.owned.tasks)
            advice = f"; to let every rank step its share, {self.joint.hint}" if self.joint.hint else ""
            warnings.warn(
                OneRankSteps(
                    f"rank {rank} alone steps all parameters of {plain_class(optimizer).__name__} and keeps their "
                    f"state ({len(plan.bound)} parameters, {size / 2**20:.3g} MiB), because {self.joint.reason}{advice}"
                ),
                stacklevel=2,
            )

    def lineup(self, part: Part, names: Names) -> Lineup:
        """Return the variants of a part of the step."""
        bound = ((name, self.plan.bound[name]) for name in names)
        return tuple((b.kind.templates[part].name, b.param_group, (name,)) for name, b in bound)

    def step(self, names: Names, run: Callable[[Lineup], None]) -> None:
        """Take the step.

        Args:
            names: the tasks that have gradients.
            run: runs the program of these tasks for a lineup.
        """
        run(self.lineup(Part.BRING, names))
        changes: Any = self._stepped(names) if self.here else None
        if len(self.ranks) > 1:
            changes = send_values(changes, self.owner, self.groups.of(self.ranks), self.device, self.watch)
        show(changes, self.optimizer)
        run(self.lineup(Part.TAKE, names))
        self._brought = {}

    def _stepped(self, names: Names) -> list[dict[Any, Any]]:
        own = {name: self._brought.get(name) for name in self.plan.bound}
        whole = {name: stands_for(self.plan.bound[name]) if p is None else p for name, p in own.items()}
        by_group: list[list[Tensor]] = [[] for _ in self.optimizer.param_groups]
        for name, param in whole.items():
            by_group[self.plan.bound[name].param_group].append(param)
        real = {whole[name]: bound.param for name, bound in self.plan.bound.items()}
        state = {param: self.optimizer.state.get(key) or {} for param, key in real.items()}
        known = self.joint.attributes | self.joint.hyperparameters
        changes = step_at_once(self.optimizer, by_group, state, known)
        self.optimizer.state.update({real[param]: kept for param, kept in state.items() if kept})
        return changes

    def bring(self, task: str, param: Tensor, grad: Tensor) -> None:
        """Keep copies of a whole parameter and its gradient."""
        self._brought[task] = whole_copy(param, grad, marks_of(self.plan.bound[task].origin))

    def take(self, task: str) -> Tensor:
        """Return the new value of a parameter."""
        return self._brought[task].detach()


def stands_for(bound: BoundParam) -> Tensor:
    """Make what stands for a parameter without a gradient."""
    param = bound.param
    return absent(bound.task.shape, param.dtype, torch.device(param.device), marks_of(bound.origin))


def check_whole(bound: Mapping[str, BoundParam]) -> None:
    """Raise unless every task is a whole parameter.

    Raises:
        UnsupportedOptimizer: one is a piece of a parameter, a plain fragment, or some entries of a stack.
    """
    for name, own in bound.items():
        if own.division is not None or own.stand_in is not None or tuple(own.param.shape) != own.task.shape:
            raise UnsupportedOptimizer(
                "the optimizer steps all parameters at once, and this is only a part of one to it",
                at=name,
                hint="wrap without split= and layout=; stacks must not be cut between their matrices",
            )
