"""Run passes in order, verify the step after each one, and keep every intermediate step."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch import fx

from canzona_compile.compat.interrupts import uninterrupted
from canzona_compile.compat.torch_private import OpOverload
from canzona_compile.errors import CanzonaError, InvalidStep, PipelineError
from canzona_compile.ir.step import Form, Step
from canzona_compile.ir.verifier import verify


class Pass(Protocol):
    """A rewrite of steps: a frozen dataclass whose fields are its options.

    A pass takes steps of the form `requires` and returns steps of the form `ensures`.
    """

    name: ClassVar[str]
    requires: ClassVar[Form]
    ensures: ClassVar[Form]

    def __call__(self, step: Step) -> Step: ...


@dataclass(frozen=True, slots=True)
class PassRecord:
    """What one pass did.

    Attributes:
        seconds: the time that the pass took, without verification.
        nodes: how many nodes the pass added to the graphs that would run (see `graphs`), less those that it removed.
    """

    name: str
    seconds: float
    before: Step
    after: Step
    nodes: int
    ops: dict[str, int]


class Observer(Protocol):
    """Called with what each pass did, after its result was verified."""

    def __call__(self, record: PassRecord, /) -> None: ...


@dataclass(frozen=True, slots=True)
class PassHistory:
    """What each pass did, in order."""

    records: tuple[PassRecord, ...] = ()

    def step_at(self, where: Form | str) -> Step:
        """Find an intermediate step.

        Args:
            where: a form (also by its name, "placed") for the last step of that form, or the name of a pass ("place")
                for the step after it.
        """
        steps = {record.name: record.after for record in self.records}
        for record in self.records:
            steps |= {step.form.name.lower(): step for step in (record.before, record.after)}
        name = where.name.lower() if isinstance(where, Form) else where
        if name not in steps:
            raise CanzonaError(f"no step {name!r} was kept", hint=f"there are {', '.join(steps) or 'none'}")
        return steps[name]


def check_order(passes: Sequence[Pass], start: Form) -> None:
    """Check, without running any pass, that every pass would get a step of the form that it requires."""
    form, source = start, "the step given to it is of"
    for current in passes:
        needed, name = current.requires, current.name
        if form != needed:
            hint = f"put a pass that ensures {needed.name.lower()} before {name}"
            if form > needed:  # the pass would drop or contradict what later forms have added
                hint = f"put {name} before the passes that go beyond {needed.name.lower()}"
            raise PipelineError(
                f"{name} needs form {needed.name.lower()}, but {source} form {form.name.lower()}",
                hint=hint,
            )
        form, source = current.ensures, f"{name} leaves"


def run(step: Step, passes: Sequence[Pass], observers: Sequence[Observer] = ()) -> tuple[Step, PassHistory]:
    """Apply passes in order. Verify the step before the first pass and after each one."""
    check_order(passes, step.form)
    try:
        verify(step)
    except InvalidStep as error:
        error.add_note("before any pass ran")
        raise
    records: list[PassRecord] = []
    for current in passes:
        begin = time.perf_counter()
        after = call(current, step, records)
        seconds = time.perf_counter() - begin
        checked(current, step, after)
        nodes, ops = added_by(step, after)
        records.append(PassRecord(current.name, seconds, step, after, nodes, ops))
        for observer in observers:
            observer(records[-1])
        step = after
    return step, PassHistory(tuple(records))


@uninterrupted
def call(current: Pass, step: Step, records: Sequence[PassRecord]) -> Step:
    """Apply one pass. If it raises, the error names the pass and the passes before it."""
    earlier = ", ".join(record.name for record in records) or "no other pass"
    try:
        return current(step)
    except CanzonaError as error:
        error.add_note(f"in pass {current.name}, after {earlier}")
        raise
    except Exception as error:
        raise PipelineError(
            f"{current.name} failed: {type(error).__name__}: {error}",
            at=f"pass {current.name}, after {earlier}",
            hint="a bug in this pass; its traceback is above",
        ) from error


def checked(current: Pass, before: Step, after: Step) -> None:
    """Verify the step that a pass returned for a valid step."""
    hint = f"a bug in {current.name}: the step before it was valid"
    if after.form is not current.ensures:
        raise InvalidStep(
            f"{current.name} promises form {current.ensures.name.lower()} and returned {after.form.name.lower()}",
            at=f"after pass {current.name}",
            hint=hint,
        )
    try:
        verify(after, before)
    except InvalidStep as error:
        raise InvalidStep(error.problem, at=f"{error.at}, after pass {current.name}", hint=hint) from error


def graphs(step: Step) -> Iterator[fx.Graph]:
    """The graphs that a step would run: those of its program, else those of its cuts, else those of its templates."""
    if step.program is not None:
        for module in step.program.module.modules():
            if isinstance(module, fx.GraphModule):
                yield module.graph
    elif step.placed:
        for cut in step.placed:
            compute = cut.compute if cut.stacked is None else cut.stacked.graph
            yield from (cut.prepare, compute, cut.apply)
    else:
        yield from (template.graph for template in step.templates)


def added_by(before: Step, after: Step) -> tuple[int, dict[str, int]]:
    """Count what a pass added to the graphs.

    Returns:
        The number of nodes, and the number of calls of each ATen operator; negative if the pass removed more.
    """
    ops: Counter[str] = Counter()
    nodes = 0
    for step, sign in ((before, -1), (after, 1)):
        for graph in graphs(step):
            nodes += sign * len(graph.nodes)
            for node in graph.nodes:
                if isinstance(node.target, OpOverload):
                    ops[str(node.target)] += sign
    return nodes, {name: count for name, count in sorted(ops.items()) if count}
