"""The step of all parameters at once: brought to one rank, stepped there, and taken back."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from canzona_compile.capture.eager_fallback import Part
from canzona_compile.capture.joint import JointUpdate, check_no_fragments, show, step_at_once, whole_copy
from canzona_compile.capture.randomness import watched
from canzona_compile.capture.twin import plain_class
from canzona_compile.errors import OneRankSteps, UnsupportedOptimizer
from canzona_compile.ir.program_ops import Watch
from canzona_compile.runtime.process_groups import Groups
from canzona_compile.runtime.send_values import send_values
from canzona_compile.session.bound import BoundParam
from canzona_compile.session.plan import Plan
from canzona_compile.session.program_cache import ProgramKey
from canzona_compile.session.variant_selection import Names


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

    def step(self, ready: Names, run: Callable[[ProgramKey], None]) -> list[str]:
        """Take the step.

        Args:
            ready: the tasks that have gradients.
            run: runs the program of some tasks and variants.

        Returns:
            The tasks that have state after it.
        """
        there = set(ready)
        names = tuple(self.plan.bound)
        try:
            run(self._program(names, [Part.BRING if name in there else Part.STILL for name in names]))
            left: Any = self._stepped() if self.here else None
            if len(self.ranks) > 1:
                left = send_values(left, self.owner, self.groups.of(self.ranks), self.device, self.watch)
            homes, same, stateful = left
            show(homes, same, self.optimizer)
            run(self._program(names, [Part.TAKE] * len(names)))
        finally:
            self._brought = {}
        return list(stateful)

    def _program(self, names: Names, parts: Sequence[Part]) -> ProgramKey:
        """The program in which tasks take these parts of the step."""
        bound = [(self.plan.bound[name], part) for name, part in zip(names, parts, strict=True)]
        lineup = tuple((b.kind.templates[part].name, b.param_group, (b.task.name,)) for b, part in bound)
        return ProgramKey(names, lineup)

    def _stepped(self) -> tuple[Any, Any, list[str]]:
        """Step what was brought; return what every rank has to know: `show`'s arguments, and which tasks have state."""
        by_group: list[list[Tensor]] = [[] for _ in self.optimizer.param_groups]
        state: dict[Tensor, dict[str, Any]] = {}
        for name, bound in self.plan.bound.items():
            own = self._brought[name]
            by_group[bound.param_group].append(own)
            if bound.param in self.optimizer.state:
                state[own] = self.optimizer.state[bound.param]
        with watched(self.device) as dice:
            result = step_at_once(self.optimizer, by_group, state)
        if dice.rolled:
            raise UnsupportedOptimizer(f"{plain_class(self.optimizer).__name__} draws random numbers by now")
        for name, bound in self.plan.bound.items():
            self.optimizer.state.pop(bound.param, None)
            if self._brought[name] in result.state:
                self.optimizer.state[bound.param] = result.state[self._brought[name]]
        stateful = [name for name, bound in self.plan.bound.items() if bound.param in self.optimizer.state]
        return result.homes, result.same, stateful

    def bring(self, task: str, param: Tensor, grad: Tensor | None) -> None:
        """Keep copies of a whole parameter, and of its gradient if it has one."""
        self._brought[task] = whole_copy(param, grad, self.plan.bound[task].origin)

    def take(self, task: str) -> Tensor:
        """Return the new value of a parameter."""
        return self._brought[task].detach()


def check_whole(bound: Mapping[str, BoundParam]) -> None:
    """Raise unless every task is a whole parameter.

    Raises:
        UnsupportedOptimizer: one is a piece of a parameter, a plain fragment, some entries of a stack, it is not
            contiguous, or one of its attributes is a DTensor.
    """
    for name, own in bound.items():
        check_no_fragments(own.origin)
        if own.division is not None or own.stand_in is not None or tuple(own.param.shape) != own.task.shape:
            raise UnsupportedOptimizer(
                "the optimizer steps all parameters at once, and this is only a part of one to it",
                at=name,
                hint="wrap without split= and layout=; stacks must not be cut between their matrices",
            )
        if not torch.empty_strided(own.task.shape, own.param.stride(), device="meta").is_contiguous():
            raise UnsupportedOptimizer(
                "the optimizer steps contiguous copies of all parameters at once; this one is not contiguous, so sums "
                "over it would round otherwise",
                at=name,
                hint="make the model's parameters contiguous before the optimizer is made",
            )
