"""Hyperparameters and counters of a step, as the oracles read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer

from canzona_compile.capture.capture import Kind
from canzona_compile.capture.oracle import Scalars, Untraceable
from canzona_compile.capture.twin import python_leaves, set_leaf
from canzona_compile.errors import UnsupportedOptimizer
from canzona_compile.planner import Plan


class Numbers:
    """Asks, once per kind of parameter and group, what the optimizer's code would do on this step."""

    def __init__(self, optimizer: Optimizer, plan: Plan) -> None:
        self.optimizer, self.plan = optimizer, plan
        self._scalars: dict[tuple[str, int], Scalars] = {}

    def consult(self, tasks: Sequence[str]) -> None:
        """Read this step's scalars.

        Raises:
            Untraceable: the code would take another path than the captured one.
        """
        self._scalars = {}
        for name in tasks:
            bound = self.plan.bound[name]
            key = (bound.kind.template.name, bound.group)
            if key in self._scalars or bound.kind.oracle is None:
                continue
            self._give_counters(bound.kind, bound.group, tasks)
            variant, scalars = bound.kind.oracle.consult(self.optimizer.param_groups[bound.group])
            if variant is not bound.kind.variant:
                raise Untraceable("the hyperparameters lead to other code")
            self._scalars[key] = scalars

    def of(self, template: str, group: int, name: str) -> Any:
        return self._scalars[template, group][name]

    def _give_counters(self, kind: Kind, group: int, tasks: Sequence[str]) -> None:
        """Give the twin the Python leaves of the optimizer's own state."""
        if not kind.python_state or kind.oracle is None:
            return
        alike = [b for n in tasks if (b := self.plan.bound[n]).kind is kind and b.group == group]
        counters = [python_leaves(self.optimizer.state[b.param]) for b in alike]
        if any(c != counters[0] for c in counters):
            raise UnsupportedOptimizer(
                "parameters alike have different counters in their state",
                at=alike[0].task.name,
                hint="give every parameter of a group a gradient on every step",
            )
        for name, value in counters[0].items():
            set_leaf(kind.oracle.twin_state(), name, value)

    def show_counters(self, tasks: Sequence[str]) -> None:
        """Copy the Python leaves that the step changed on the twin to the optimizer's own state."""
        for name in tasks:
            bound = self.plan.bound[name]
            if bound.kind.python_state and bound.kind.oracle is not None:
                for leaf, value in python_leaves(bound.kind.oracle.twin_state()).items():
                    set_leaf(self.optimizer.state[bound.param], leaf, value)
