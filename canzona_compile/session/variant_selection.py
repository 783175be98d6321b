"""Ask the recorders which variant of the optimizer's code each task takes on a step, and with which numbers."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from canzona_compile.capture.param_kind import ParamKind
from canzona_compile.capture.templates import Capture
from canzona_compile.capture.variant import Scalars
from canzona_compile.compat.interrupts import uninterrupted
from canzona_compile.ir.layout import Ranks
from canzona_compile.replica.external_counters import Counter
from canzona_compile.replica.homes import hypers
from canzona_compile.replica.leaves import read, write
from canzona_compile.replica.raised import Untraceable
from canzona_compile.session.plan import BoundParam, Plan

Names = tuple[str, ...]
ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
VariantAssignment = tuple[tuple[str, int, Names], ...]  # each entry: a template, the label of its numbers, its tasks


@dataclass(frozen=True, eq=False, slots=True)
class SameCounters:
    """Tasks of one kind and one parameter group that have equal counters in their state.

    Attributes:
        template: the name of the template of the variant that their code takes now.
        label: distinguishes the numbers of cohorts that take the same template. It is the index of the parameter
            group, unless the parameter group has several such cohorts.
        scalars: by name, the values that the graph reads besides the tensors of a task.
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
    """What the optimizer's code does on a step.

    Attributes:
        scalars: by name, the values that the graph reads besides the tensors of a task.
        counters: the Python leaves of the state after the step.
    """

    template: str
    scalars: Scalars
    before: Mapping[Any, Any]
    counters: Mapping[str, Any]


class AlikeTasks(NamedTuple):
    """Tasks whose parameters are of one kind, in one parameter group."""

    kind: ParamKind
    param_group: int
    tasks: Names


class VariantSelection:
    """Asks once per cohort what the optimizer's code does on a step.

    Args:
        ahead: by task, the number of steps by which it does its periodic work earlier, see `stagger`.

    Attributes:
        current: the cohorts of the step that `consult` was last called for.
    """

    def __init__(self, capture: Capture, plan: Plan, ahead: Mapping[str, int]) -> None:
        self.capture, self.plan, self.ahead = capture, plan, ahead
        self.current: list[SameCounters] = []
        self._matrix_dims = [group.get("matrix_dims") for group in self.capture.optimizer.param_groups]  # of the plan
        self._scalars: dict[tuple[str, int], Scalars] = {}
        self._tasks: Sequence[str] = ()  # of the last call of `consult`
        self._of_one_kind: list[AlikeTasks] = []  # the same tasks, by kind and parameter group

    @uninterrupted
    def consult(self, tasks: Sequence[str], present: Container[str]) -> None:
        """Find the cohorts of this step."""
        self.current, self._scalars = [], {}
        if tasks != self._tasks:
            bounds = [self.plan.bound[name] for name in tasks]
            # Shared tasks come first, so that tasks of a single rank do not change their labels.
            bounds.sort(key=lambda b: b.task.layout.grid.size == 1)
            self._tasks, self._of_one_kind = tasks, by_kind(bounds)
        with self._asking():
            for kind, group, names in self._of_one_kind:
                for counters, own in self._alike(kind, names).items():
                    self._take(kind, group, counters, own)
            for kind, group, names in by_kind(self._elementwise(present)):
                for counters in self._alike(kind, names):
                    self._ask(kind, group, counters)

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        """Set up once what the recorders need for their questions."""
        with contextlib.ExitStack() as stack:
            for way in {type(kind.recorder) for kind in self.capture.kinds.values() if kind.recorder is not None}:
                stack.enter_context(way.asking())
            yield

    def _take(self, kind: ParamKind, group: int, counters: tuple[Any, ...], names: Sequence[str]) -> None:
        """Find the cohorts among tasks of one kind and parameter group that have equal counters."""
        for path, own in self._paths(kind, group, counters, names):
            label = group
            if (path.template, label) in self._scalars:
                label = len(self.capture.optimizer.param_groups) + len(self._scalars)
            self._scalars[path.template, label] = path.scalars
            self.current.append(SameCounters(kind, tuple(own), path.template, label, path.scalars, path.counters))

    @property
    def assignment(self) -> VariantAssignment:
        """The variants that the tasks take now. Together with the tasks they determine the program."""
        return tuple((c.template, c.label, c.tasks) for c in self.current)

    def number(self, template: str, label: int, name: str) -> Any:
        """Return the value that the graph of a template reads under this name for the cohort with this label."""
        return self._scalars[template, label][name]

    def show_counters(self) -> None:
        """Copy the Python leaves that the step changed on the twins into the optimizer's own state."""
        for cohort in self.current:
            for name in cohort.tasks if cohort.counters else ():
                state = self.capture.optimizer.state[self.plan.bound[name].param]
                for leaf, value in cohort.counters.items():
                    write(state, cohort.kind.paths[leaf], value, cohort.kind.structure)

    def _alike(self, kind: ParamKind, names: Names) -> Mapping[tuple[Any, ...], Sequence[str]]:
        """Divide tasks of one kind by the counters in their state."""
        if not kind.python_state:
            return {(): names}
        found: dict[tuple[Any, ...], list[str]] = {}
        paths = [kind.paths[name] for name in kind.python_state]
        for name in names:
            state = self.capture.optimizer.state[self.plan.bound[name].param]
            found.setdefault(tuple(read(state, path) for path in paths), []).append(name)
        return found

    def _elementwise(self, present: Container[str]) -> list[BoundParam]:
        """The parameters that the optimizer's own step updates. Their code may later do more than elementwise work."""
        state, own = self.capture.optimizer.state, [b for b in self.plan.elementwise if b.task.name in present]
        return [b for b in own if state.get(b.param) or not (b.kind.state or b.kind.python_state)]

    def _paths(
        self, kind: ParamKind, group: int, counters: tuple[Any, ...], names: Sequence[str]
    ) -> Iterable[tuple[VariantPath, Sequence[str]]]:
        """Find the paths of tasks with equal counters: one path, unless some do periodic work earlier."""
        if not self.ahead:
            return [(self._ask(kind, group, counters), names)]
        own: dict[int, list[str]] = {}
        for name in names:
            own.setdefault(self.ahead.get(name, 0), []).append(name)
        others = {steps: self._ask_ahead(kind, group, counters, steps) for steps in own if steps}
        here = self._ask(kind, group, counters)  # last, so that the twin keeps the counters of the parameters
        found: dict[str, tuple[VariantPath, list[str]]] = {}
        for steps, alike in own.items():
            other = others.get(steps)
            path = here if other is None else counting_as(here, other, kind)
            found.setdefault(path.template, (path, []))[1].extend(alike)
        return found.values()

    def _ask(self, kind: ParamKind, group: int, counters: tuple[Any, ...], ahead: int = 0) -> VariantPath:
        """Ask what the code does with these counters, or with counters that are `ahead` by some steps."""
        assert kind.recorder is not None
        if self.capture.optimizer.param_groups[group].get("matrix_dims") != self._matrix_dims[group]:
            raise Untraceable("other dims count matrices")
        leaves, elsewhere = dict(zip(kind.python_state, counters, strict=False)), self.capture.elsewhere()
        known = self.capture.counters_at(self.capture.optimizer.param_groups[group], leaves, elsewhere)
        if ahead and kind.variant_period is not None:
            known = kind.variant_period.ahead(known, ahead)
        kind.recorder.set_leaves({name: known[name] for name in leaves})
        own = {c.key: known[c] for c in self.capture.counts if c.home == "group" and c in known}
        elsewhere = {name: known[name] for name in elsewhere}
        variant, scalars = kind.recorder.consult({**self.capture.optimizer.param_groups[group], **own}, elsewhere)
        template = kind.templates.get(variant)
        if template is None or template.name not in self.plan.known:
            raise Untraceable("hyperparameters or counters lead to other code")
        return VariantPath(template.name, scalars, known, kind.recorder.counters() if counters else {})

    def _ask_ahead(self, kind: ParamKind, group: int, counters: tuple[Any, ...], ahead: int) -> VariantPath | None:
        """Ask the same for a task that is ahead.

        Returns:
            None if the variants do not repeat themselves yet, or if the plan does not know the variant.
        """
        leaves = dict(zip(kind.python_state, counters, strict=False))
        known = self.capture.counters_at(self.capture.optimizer.param_groups[group], leaves, self.capture.elsewhere())
        if kind.variant_period is None or kind.variant_period.number(known) < kind.variant_period.start:
            return None
        with contextlib.suppress(Untraceable):
            return self._ask(kind, group, counters, ahead)
        return None


def by_kind(bounds: Iterable[BoundParam]) -> list[AlikeTasks]:
    """Divide the tasks of captured parameters by kind and parameter group."""
    found: dict[tuple[int, int], list[BoundParam]] = {}
    for b in bounds:
        if b.kind.recorder is not None:
            found.setdefault((id(b.kind), b.task.param_group), []).append(b)
    return [AlikeTasks(own[0].kind, own[0].task.param_group, tuple(b.task.name for b in own)) for own in found.values()]


def counting_as(here: VariantPath, other: VariantPath, kind: ParamKind) -> VariantPath:
    """Give a path of a task that is ahead the counters of a task that is not.

    Returns:
        The template of `other`, with the counters of `here` and the numbers that follow from these counters.
    """
    assert kind.variant_period is not None
    scalars = dict(other.scalars)
    for name, value in scalars.items():
        if name in here.scalars:
            scalars[name] = here.scalars[name]
            continue
        for counter in kind.variant_period.counters:  # only the other path reads it, so find it by name and value
            key = counter.key if isinstance(counter, Counter) else str(kind.paths[counter][-1])
            if name.endswith(key) and value == other.before[counter]:
                scalars[name] = here.before[counter]
    after = {**other.counters, **{k: v for k, v in here.counters.items() if k in kind.variant_period.counters}}
    return VariantPath(other.template, scalars, here.before, after)


class SharedNumbers:
    """The hyperparameters and counters of tasks that ranks share."""

    def __init__(self, plan: Plan) -> None:
        shared = [task for task in plan.owned.tasks if task.layout.grid.size > 1]
        self._first: dict[Ranks, dict[int, str]] = {}  # by set of ranks and parameter group, its first task
        self._ranks_of: dict[str, Ranks] = {}
        for task in shared:
            ranks = self._ranks_of[task.name] = tuple(sorted(task.layout.grid.members()))
            self._first.setdefault(ranks, {}).setdefault(task.param_group, task.name)
        self._firsts: dict[Names, dict[Ranks, str]] = {}  # by the tasks of a cohort, the first one of each set of ranks

    def text(self, groups: Sequence[dict[str, Any]], cohorts: Sequence[SameCounters]) -> dict[Ranks, str]:
        """Describe the numbers of a step by set of ranks, one line for each parameter group and cohort."""
        found = {
            ranks: [f"the group of {name} has {described(groups[g])}" for g, name in first.items() if g < len(groups)]
            for ranks, first in self._first.items()
        }
        for cohort in cohorts:
            numbers = f"{described(cohort.scalars)} {described(cohort.counters)}"
            for ranks, name in self._first_of_each(cohort.tasks).items():
                found[ranks].append(f"{name} reads {numbers}")
        # Ranks may have cohorts in another order, because of tasks that others share.
        return {ranks: "\n".join(sorted(lines)) for ranks, lines in found.items()}

    def _first_of_each(self, tasks: Names) -> dict[Ranks, str]:
        if tasks not in self._firsts:
            shared = [(self._ranks_of[name], name) for name in tasks if name in self._ranks_of]
            self._firsts[tasks] = dict(reversed(shared))
        return self._firsts[tasks]


def described(values: Any) -> str:
    """Numbers and texts by name. Reading a tensor on a device would make the host wait, so those are left out."""
    return ", ".join(
        f"{name}={value_text(value)}"
        for name, value in sorted(hypers(values).items())
        if not isinstance(value, Tensor) or value.device.type == "cpu"
    )


def value_text(value: Any) -> str:
    """One value, without what differs between processes that hold equal ones: addresses, and the order of sets."""
    if isinstance(value, Tensor):
        return str(value.tolist())
    text = repr(sorted(value, key=repr)) if isinstance(value, set | frozenset) else repr(value)
    return ADDRESS.sub("", text)
