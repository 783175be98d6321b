"""Which path each task's code takes in a step, and with which numbers, as the oracles say."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from canzona_compile.capture.dynamo_oracle import Scalars, Untraceable
from canzona_compile.capture.external_counters import Counter
from canzona_compile.capture.leaves import read, write
from canzona_compile.capture.templates import Capture, ParamKind
from canzona_compile.session.bind import BoundParam
from canzona_compile.session.plan import Plan

Names = tuple[str, ...]
Lineup = tuple[tuple[str, int, Names], ...]  # template, label of its numbers, tasks


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

    kind: ParamKind
    tasks: Names
    template: str
    label: int
    scalars: Scalars
    counters: Mapping[str, Any]


@dataclass(frozen=True, eq=False, slots=True)
class VariantPath:
    """What code does on a step: a template, its numbers, and the counters before and after."""

    template: str
    scalars: Scalars
    before: Mapping[Any, Any]
    counters: Mapping[str, Any]


class VariantSelection:
    """Asks what the optimizer's code would do on this step, once per cohort.

    Args:
        ahead: steps by which tasks do their periodic work earlier, see `stagger`.
    """

    def __init__(self, capture: Capture, plan: Plan, ahead: Mapping[str, int]) -> None:
        self.capture, self.optimizer, self.plan, self.ahead = capture, capture.optimizer, plan, ahead
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
            for path, own in self._paths(kind, group, counters, members):
                label = group
                if (path.template, label) in self._scalars:
                    label = len(self.optimizer.param_groups) + len(self._scalars)
                self._scalars[path.template, label] = path.scalars
                names = tuple(b.task.name for b in own)
                self.current.append(Cohort(kind, names, path.template, label, path.scalars, path.counters))
        for (_, group, counters), members in self._alike(self._elementwise()).items():
            self._ask(members[0].kind, group, counters)

    @property
    def lineup(self) -> Lineup:
        """The variants that the tasks take now. With the tasks they decide the program."""
        return tuple((c.template, c.label, c.tasks) for c in self.current)

    def number(self, template: str, label: int, name: str) -> Any:
        """A number that the graph of a template reads, for the cohort with this label."""
        return self._scalars[template, label][name]

    def show_counters(self) -> None:
        """Copy the Python leaves that the step changed on the twins to the optimizer's own state."""
        for cohort in self.current:
            for name in cohort.tasks if cohort.counters else ():
                state = self.optimizer.state[self.plan.bound[name].param]
                for leaf, value in cohort.counters.items():
                    write(state, cohort.kind.paths[leaf], value, cohort.kind.structure)

    def _alike(self, bounds: Sequence[BoundParam]) -> dict[tuple[int, int, tuple[Any, ...]], list[BoundParam]]:
        found: dict[tuple[int, int, tuple[Any, ...]], list[BoundParam]] = {}
        for b in bounds:
            if b.kind.oracle is not None:
                found.setdefault((id(b.kind), b.param_group, self._counters(b)), []).append(b)
        return found

    def _counters(self, bound: BoundParam) -> tuple[Any, ...]:
        kind = bound.kind
        if not kind.python_state:
            return ()
        state = self.optimizer.state[bound.param]
        return tuple(read(state, kind.paths[name]) for name in kind.python_state)

    def _elementwise(self) -> list[BoundParam]:
        """Those that the optimizer's own step updates: their code may come to do more than that."""
        present = [b for b in self.plan.elementwise if b.param.grad is not None]
        return [b for b in present if self.optimizer.state.get(b.param) or not b.kind.state]

    def _paths(
        self, kind: ParamKind, group: int, counters: tuple[Any, ...], members: Sequence[BoundParam]
    ) -> list[tuple[VariantPath, list[BoundParam]]]:
        """The ways that parameters with equal counters go: one, unless some do their periodic work earlier."""
        own: dict[int, list[BoundParam]] = {}
        for b in members:
            own.setdefault(self.ahead.get(b.task.name, 0), []).append(b)
        others = {steps: self._ask_ahead(kind, group, counters, steps) for steps in own if steps}
        here = self._ask(kind, group, counters)  # last, so that the twin has counted as the parameters do
        found: dict[str, tuple[VariantPath, list[BoundParam]]] = {}
        for steps, bounds in own.items():
            other = others.get(steps)
            path = here if other is None else counting_as(here, other, kind)
            found.setdefault(path.template, (path, []))[1].extend(bounds)
        return list(found.values())

    def _ask(self, kind: ParamKind, group: int, counters: tuple[Any, ...], ahead: int = 0) -> VariantPath:
        """What the code does, by its counters, or as if these were `ahead`."""
        assert kind.oracle is not None
        leaves = dict(zip(kind.python_state, counters, strict=False))
        known = self.capture.counters_at(self.optimizer.param_groups[group], leaves, self.capture.elsewhere())
        if ahead and kind.course is not None:
            known = kind.course.ahead(known, ahead)
        kind.oracle.count({name: known[name] for name in leaves})
        own = {c.key: known[c] for c in self.capture.counts if c.home == "group" and c in known}
        elsewhere = {name: known[name] for name in self.capture.elsewhere()}
        variant, scalars = kind.oracle.consult({**self.optimizer.param_groups[group], **own}, elsewhere)
        template = kind.templates.get(variant)
        if template is None or template.name not in self.plan.known:
            raise Untraceable("hyperparameters or counters lead to other code")
        return VariantPath(template.name, scalars, known, kind.oracle.counters() if counters else {})

    def _ask_ahead(self, kind: ParamKind, group: int, counters: tuple[Any, ...], ahead: int) -> VariantPath | None:
        """The same for a task that is ahead; None where its code does not repeat itself yet, or is new there."""
        leaves = dict(zip(kind.python_state, counters, strict=False))
        known = self.capture.counters_at(self.optimizer.param_groups[group], leaves, self.capture.elsewhere())
        if kind.course is None or kind.course.number(known) < kind.course.start:
            return None
        with contextlib.suppress(Untraceable):
            return self._ask(kind, group, counters, ahead)
        return None


def counting_as(here: VariantPath, other: VariantPath, kind: ParamKind) -> VariantPath:
    """The other path, with the counters of this one and with the numbers that follow from them."""
    assert kind.course is not None
    scalars = dict(other.scalars)
    for name, value in scalars.items():
        if name in here.scalars:
            scalars[name] = here.scalars[name]
            continue
        for counter in kind.course.counters:  # read on the other path only, so known by name and value
            key = counter.key if isinstance(counter, Counter) else str(kind.paths[counter][-1])
            if name.endswith(key) and value == other.before[counter]:
                scalars[name] = here.before[counter]
    after = {**other.counters, **{k: v for k, v in here.counters.items() if k in kind.course.counters}}
    return VariantPath(other.template, scalars, here.before, after)
