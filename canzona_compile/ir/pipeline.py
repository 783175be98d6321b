"""Runs passes in order, verifies after each one, and keeps every intermediate step."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from rich.table import Table
from torch import fx

from canzona_compile.errors import CanzonaError, InvalidStep, PipelineError, some
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
        seconds: that the pass took, without verification.
        nodes, ops: change in the number of graph nodes, and of calls of each ATen operator, over
            the graphs that would run (see `graphs`).
    """

    name: str
    seconds: float
    before: Step
    after: Step
    nodes: int
    ops: dict[str, int]


class Observer(Protocol):
    """Sees every pass from outside, after its result was verified."""

    def __call__(self, record: PassRecord, /) -> None: ...


@dataclass(frozen=True, slots=True)
class PassHistory:
    """What each pass did, in order. Prints as a table (`rich.print`)."""

    records: tuple[PassRecord, ...] = ()

    def step_at(self, where: Form | str) -> Step:
        """The last step of a form ("placed"), or the step after a pass ("place").

        Raises:
            CanzonaError: there is none.
        """
        steps = {record.name: record.after for record in self.records}
        steps |= {step.form.name.lower(): step for step in self._steps()}
        name = where.name.lower() if isinstance(where, Form) else where
        if name not in steps:
            raise CanzonaError(f"no step {name!r} was kept", hint=f"there are {', '.join(steps) or 'none'}")
        return steps[name]

    def _steps(self) -> Iterator[Step]:
        for i, record in enumerate(self.records):
            if i == 0:
                yield record.before
            yield record.after

    def __rich__(self) -> Table:
        table = Table(title="passes")
        table.add_column("pass")
        table.add_column("form")
        table.add_column("ms", justify="right")
        table.add_column("nodes", justify="right")
        table.add_column("operators")
        for record in self.records:
            changed = sorted(record.ops.items(), key=lambda op: (-abs(op[1]), op[0]))
            table.add_row(
                record.name,
                record.after.form.name.lower(),
                f"{record.seconds * 1e3:.1f}",
                f"{record.nodes:+d}" if record.nodes else "",
                some(f"{count:+d} {brief(name)}" for name, count in changed),
            )
        return table


def brief(op: str) -> str:
    """mm for aten.mm.default."""
    return op.removeprefix("aten.").removesuffix(".default")


def check_order(passes: Sequence[Pass], start: Form) -> None:
    """Check that every pass gets a step of the form that it requires.

    Raises:
        PipelineError: one would not; no pass has run.
    """
    form, source = start, "the step given to it is of"
    for current in passes:
        needed, name = current.requires, current.name
        if form != needed:
            hint = f"put a pass that ensures {needed.name.lower()} before {name}"
            if form > needed:  # it would drop or contradict what was added since
                hint = f"put {name} before the passes that go beyond {needed.name.lower()}"
            raise PipelineError(
                f"{name} needs form {needed.name.lower()}, but {source} form {form.name.lower()}",
                hint=hint,
            )
        form, source = current.ensures, f"{name} leaves"


def run(step: Step, passes: Sequence[Pass], observers: Sequence[Observer] = ()) -> tuple[Step, PassHistory]:
    """Apply passes in order and verify the step before the first and after each of them.

    Raises:
        PipelineError: the order is wrong (before any pass ran), or a pass failed.
        InvalidStep: a pass broke a promise; the message names it.
    """
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
        nodes, ops = difference(step, after)
        records.append(PassRecord(current.name, seconds, step, after, nodes, ops))
        for observer in observers:
            observer(records[-1])
        step = after
    return step, PassHistory(tuple(records))


def call(current: Pass, step: Step, records: Sequence[PassRecord]) -> Step:
    """Apply one pass; whatever it raises says which pass it was and what ran before it."""
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
    """Verify what a pass made of a valid step.

    Raises:
        InvalidStep: the form is not the one that the pass ensures, or a promise of the form is broken.
    """
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
    """The graphs that a step would run: templates, once placed their cuts, at last the program."""
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


def difference(before: Step, after: Step) -> tuple[int, dict[str, int]]:
    """Nodes and calls of ATen operators that a pass added, negative where it removed some."""
    ops: Counter[str] = Counter()
    nodes = 0
    for step, sign in ((before, -1), (after, 1)):
        for graph in graphs(step):
            nodes += sign * len(graph.nodes)
            for node in graph.nodes:
                if isinstance(node.target, torch._ops.OpOverload):
                    ops[str(node.target)] += sign
    return nodes, {name: count for name, count in sorted(ops.items()) if count}
