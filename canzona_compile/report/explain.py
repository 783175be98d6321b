"""`explain`: how each parameter of an optimizer is updated, and why: by the plan in use, or by one made to tell."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from canzona_compile.errors import CanzonaError, some
from canzona_compile.ir.layout import Shape
from canzona_compile.ir.step import Strategy, Task
from canzona_compile.report.page import PageModel, PageTable, Words, note
from canzona_compile.report.printable import Printable
from canzona_compile.report.sections import names_by_reason
from canzona_compile.report.units import format_shape
from canzona_compile.session.plan import BoundParam, Plan, make_plan
from canzona_compile.session.session import Session

STYLES = {
    "compiled": "green",
    "eager": "yellow",
    "local": "cyan",
    "refused": "red",
}


@dataclass(frozen=True, slots=True)
class ExplainedParameter:
    """One parameter.

    Attributes:
        name: its name; "name[part]" for a part of a parameter that is split.
        how: "compiled" (a graph computes its update), "eager" (the optimizer's own code does, on an owner rank that
            has the whole matrix), "local" (elementwise: each rank updates its fragment) or "refused".
        why: the rank that computes it, or the reason, with the line of the optimizer's code that led to it.
        rank: the rank that computes it alone, where one of several does.
        cell: of what is eager, whose object steps it: "matrix" (a copy of the optimizer) or "own object" (one that
            `one_per_matrix=` made).
    """

    name: str
    shape: Shape
    how: str
    why: str
    rank: int | None = None
    cell: str = ""

    @property
    def treatment(self) -> tuple[Shape, str, str]:
        """What it has in common with parameters that other ranks compute in the same way."""
        return self.shape, self.how, self.why if self.rank is None else self.why.removeprefix(on_rank(self.rank))


@dataclass(frozen=True, slots=True, repr=False)
class Explanation(Printable):
    """How each parameter of an optimizer is updated. Printed, parameters with equal shape and treatment share a row.

    Attributes:
        optimizer: the name of its class.
        parameters: one entry per parameter, in the optimizer's order.
        bits: a sentence for each optimizer that batches matrices: results have the bits of each matrix alone.
    """

    text_width = 120

    optimizer: str
    parameters: tuple[ExplainedParameter, ...]
    bits: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The same as dicts, lists and plain values."""
        return asdict(self)

    def page(self) -> PageModel:
        alike: dict[Any, list[ExplainedParameter]] = {}
        for row in self.parameters:
            alike.setdefault(row.treatment, []).append(row)
        rows = []
        for (shape, how, why), own in alike.items():
            ranks = sorted({row.rank for row in own if row.rank is not None})
            said = on_rank(*ranks) + why if ranks else why
            rows.append((some([row.name for row in own]), format_shape(shape), Words(how, STYLES[how]), said))
        title = f"canzona explains {self.optimizer}"
        table = PageTable(("parameter", "shape", "how", "why"), tuple(rows), title, framed=True)
        return PageModel((table, *(note(f"{said}.") for said in self.bits)))

    __repr__ = Printable.__str__


def explain_all(sessions: Sequence[Session]) -> Explanation:
    """Explain how each parameter of one optimizer or of several is updated, see `explained`."""
    names = "+".join(session.optimizer_name for session in sessions)
    rows = tuple(row for session in sessions for row in explained(session))
    return Explanation(names, rows, tuple(filter(None, map(bits_of, sessions))))


def bits_of(session: Session) -> str:
    """Say which bits results have if an optimizer batches matrices; empty if it does not, or is refused."""
    with contextlib.suppress(CanzonaError):
        return session.capture.rehearse().bits_of(session.optimizer_name)
    return ""


def explained(session: Session) -> tuple[ExplainedParameter, ...]:
    """Tell how each parameter is updated: by the plan in use, or before the first step by a plan made for this."""
    if session.driver is not None:
        return tuple(rows_of(session.driver.plan))
    groups, before = session.optimizer.param_groups, list(map(dict, session.optimizer.param_groups))
    try:
        return _explained_ahead(session)
    finally:  # steps may make tensors of hyperparameters, but this takes none
        for group, old in zip(groups, before, strict=True):
            group.update(old)


def _explained_ahead(session: Session) -> tuple[ExplainedParameter, ...]:
    """Explain before the first step. A collective only with `layout=`, or `replicate=` and DTensors of another mesh."""
    named, siblings = session.named, session.siblings
    binders = siblings.exchanged(session)
    refused: dict[str, CanzonaError] = {}
    bound = [b for b in session.bind(binders[session], refused) if b.name not in refused]
    rows: dict[str, list[ExplainedParameter]] = {b.name: [] for b in bound}  # several of what is split
    if bound:
        owned_as = None
        if not refused:
            with contextlib.suppress(CanzonaError):  # of another optimizer, whose own rows say it
                owned_as = siblings.owned(session, siblings.bind(session, bound, binders))
        made = make_plan(bound, session.optimizer_name, session.options, owned_as=owned_as)
        planned = {row.name: row for row in rows_of(made)}
        for b in bound:
            rows[b.name].append(planned[b.task.name])
    for name, _, param in named:
        if name in refused:
            rows[name] = [ExplainedParameter(name, tuple(param.shape), "refused", refused[name].problem)]
    return tuple(row for name, _, _ in named for row in rows[name])


def rows_of(plan: Plan) -> Iterator[ExplainedParameter]:
    """Explain each parameter of a plan."""
    owned = {task.name: task for task in plan.owned.tasks}
    for name, bound in plan.bound.items():
        reason, shape = bound.kind.template.interpreted, bound.task.shape
        if name not in owned:
            local = "elementwise: each rank updates its fragment"
            yield ExplainedParameter(name, shape, "local", local + stored_as(plan, bound))
        elif bound.kind.maker is not None:
            yield ExplainedParameter(name, shape, "eager", reason, cell="own object")
        elif reason:
            eager = f"matrix by matrix, because {reason}" + (f"; state={plan.rules}" if plan.rules else "")
            yield ExplainedParameter(name, shape, "eager", eager, cell="matrix")
        else:
            rank, why = place_of(owned[name])
            yield ExplainedParameter(name, shape, "compiled", why + way_of(bound) + stored_as(plan, bound), rank)


def way_of(bound: BoundParam) -> str:
    """Say how a parameter was captured, if not by Dynamo, and why not."""
    recorder = bound.kind.recorder
    return "" if recorder is None or not recorder.why else f"; captured by {recorder.way}, because {recorder.why}"


def stored_as(plan: Plan, bound: BoundParam) -> str:
    """Say which leaves of the state are stored in another way, and how."""
    storage_of = plan.storages(bound.task.name)
    leaves = ((leaf.name, storage_of(leaf.name, leaf.dtype)) for leaf in bound.kind.state if leaf.dtype is not None)
    found = names_by_reason((name, str(storage)) for name, storage in leaves if storage is not None)
    return "".join(f"; {', '.join(names)} stored as {storage}" for storage, names in found.items())


def place_of(task: Task) -> tuple[int | None, str]:
    """Say which rank computes a compiled task, and why; the rank also as a number, if it is one of several."""
    if task.strategy is Strategy.LOCAL:
        return None, "stored whole on its rank, so nothing is sent"
    if task.owner is None:
        return None, f"on every rank: {task.reason}"
    replica, shard = task.owner
    rank = task.layout.grid.ranks[replica][shard]
    return rank, f"{on_rank(rank)}: {task.reason}"


def on_rank(*ranks: int) -> str:
    """Name one rank or some."""
    return f"on {'rank' if len(ranks) == 1 else 'ranks'} {some(map(str, ranks))}"
