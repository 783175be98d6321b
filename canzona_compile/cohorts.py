"""Which path each task's code takes in a step, and with which numbers, as the oracles say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from canzona_compile.binding import Bound
from canzona_compile.capture.capture import Capture, Kind
from canzona_compile.capture.leaves import read, write
from canzona_compile.capture.oracle import Scalars, Untraceable
from canzona_compile.planner import Plan

Names = tuple[str, ...]


@dataclass(frozen=True, eq=False, slots=True)
class Cohort:
    """Tasks alike, of one parameter group, with the same counters in their state.

    Attributes:
        tasks: names, in the plan's order.
        template: of the variant that their code takes now.
        label: tells the numbers of a template's cohorts apart. The index of the parameter group, unless
            counters split it.
        scalars: by name, what the graph reads beside tensors.
        counters: the Python leaves of their state after this step.
    """

    kind: Kind
    tasks: Names
    template: str
    label: int
    scalars: Scalars
    counters: Mapping[str, Any]


class Cohorts:
    """Asks what the optimizer's code would do on this step, once per cohort."""

    def __init__(self, capture: Capture, plan: Plan) -> None:
        self.capture, self.optimizer, self.plan = capture, capture.optimizer, plan
        self.current: list[Cohort] = []
        self._scalars: dict[tuple[str, int], Scalars] = {}

    def consult(self, tasks: Sequence[str]) -> None:
        """Find the cohorts of this step.

        Raises:
            Untraceable: some code takes a path that this plan does not know.
        """
        self.current, self._scalars = [], {}
        bounds = [self.plan.bound[name] for name in tasks]
        # What ranks share comes first, so that what one has for itself changes no label of it.
        bounds.sort(key=lambda b: b.task.layout.grid.size == 1)
        for (_, group, counters), members in self._alike(bounds).items():
            kind = members[0].kind
            template, scalars = self._ask(kind, group, counters)
            label = group
            if (template, label) in self._scalars:
                label = len(self.optimizer.param_groups) + len(self._scalars)
            self._scalars[template, label] = scalars
            assert kind.oracle is not None
            names = tuple(b.task.name for b in members)
            after = kind.oracle.counters() if counters else {}
            self.current.append(Cohort(kind, names, template, label, scalars, after))
        for (_, group, counters), members in self._alike(self._elementwise()).items():
            self._ask(members[0].kind, group, counters)

    @property
    def lineup(self) -> tuple[tuple[str, int, Names], ...]:
        """What decides the program."""
        return tuple((c.template, c.label, c.tasks) for c in self.current)

    def number(self, template: str, label: int, name: str) -> Any:
        return self._scalars[template, label][name]

    def show_counters(self) -> None:
        """Copy the Python leaves that the step changed on the twins to the optimizer's own state."""
        for cohort in self.current:
            for name in cohort.tasks if cohort.counters else ():
                state = self.optimizer.state[self.plan.bound[name].param]
                for leaf, value in cohort.counters.items():
                    write(state, cohort.kind.paths[leaf], value, cohort.kind.structure)

    def _alike(self, bounds: Sequence[Bound]) -> dict[tuple[int, int, tuple[Any, ...]], list[Bound]]:
        found: dict[tuple[int, int, tuple[Any, ...]], list[Bound]] = {}
        for b in bounds:
            if b.kind.oracle is not None:
                found.setdefault((id(b.kind), b.group, self._counters(b)), []).append(b)
        return found

    def _counters(self, bound: Bound) -> tuple[Any, ...]:
        kind = bound.kind
        if not kind.python_state:
            return ()
        state = self.optimizer.state[bound.param]
        return tuple(read(state, kind.paths[name]) for name in kind.python_state)

    def _elementwise(self) -> list[Bound]:
        """Those that the optimizer's own step updates: their code may come to do more than that."""
        present = [b for b in self.plan.elementwise if b.param.grad is not None]
        return [b for b in present if self.optimizer.state.get(b.param) or not b.kind.state]

    def _ask(self, kind: Kind, group: int, counters: tuple[Any, ...]) -> tuple[str, Scalars]:
        oracle = kind.oracle
        assert oracle is not None
        oracle.count(dict(zip(kind.python_state, counters, strict=False)))
        variant, scalars = oracle.consult(self.optimizer.param_groups[group], self.capture.elsewhere())
        template = kind.templates.get(variant)
        if template is None or template.name not in self.plan.known:
            raise Untraceable("hyperparameters or counters lead to other code")
        return template.name, scalars
