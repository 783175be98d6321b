"""The optimizers of a chain plan together, so that owners are balanced over the matrices of all of them."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from torch.optim import Optimizer

from canzona_compile.compat.optimizer_class import plain_class
from canzona_compile.errors import CanzonaError
from canzona_compile.ir.layout import Ranks
from canzona_compile.ir.options import Options
from canzona_compile.ir.pipeline import run
from canzona_compile.ir.sequence import in_sequence
from canzona_compile.ir.step import Step, Task
from canzona_compile.passes import planning_passes
from canzona_compile.session.bind import Binder
from canzona_compile.session.plan import BoundParam, captured_step, check_pieces, joined, lower
from canzona_compile.session.step_driver import StepDriver


class PlannedSession(Protocol):
    """What is asked of the sessions that plan together; see `Session`."""

    optimizer: Optimizer
    options: Options
    driver: StepDriver | None
    shared: tuple[Ranks, ...] | None

    def exchanged(self) -> Binder: ...

    def bind(self, binder: Binder) -> list[BoundParam]: ...


Binders = Mapping[Any, Binder]  # by session, of those whose parameters are bound now


class Siblings:
    """Plans the optimizers of a chain together. Each of them steps by a program of its own.

    Args:
        sessions: those of the optimizers, in the order of the chain. Their options differ in names only.
    """

    def __init__(self, sessions: Sequence[PlannedSession]) -> None:
        self._sessions = [weakref.ref(session) for session in sessions]  # each of them refers to this
        self._owned: Step | None = None
        self._names: list[list[str]] = []  # of the tasks of each optimizer

    @property
    def sessions(self) -> tuple[PlannedSession, ...]:
        """The sessions whose optimizers are there."""
        return tuple(session for one in self._sessions if (session := one()) is not None)

    @property
    def text(self) -> str:
        """Which optimizers step in which order; ranks compare it."""
        return " and ".join(plain_class(session.optimizer).__name__ for session in self.sessions)

    @property
    def drivers(self) -> list[StepDriver | None]:
        """What takes the steps of each optimizer; None before its first one."""
        return [session.driver for session in self.sessions]

    def exchanged(self, own: PlannedSession) -> Binders:
        """Make what binds the parameters of the session that plans, and of those that have no plan yet.

        This is a collective if some parameters are plain fragments. It comes before anything that may raise, because
        other ranks wait for it.
        """
        return {session: session.exchanged() for session in self.sessions if session is own or session.driver is None}

    def owned(self, own: PlannedSession, bound: Sequence[BoundParam], binders: Binders) -> Step:
        """Choose the owners of all matrices of the chain.

        Every session asks when it plans. All of them get the same owners unless something changes in between. What a
        session has planned already stays: its owners hold state.
        """
        every: list[Sequence[BoundParam]] = []
        kept: dict[str, Task] = {}
        for session in self.sessions:
            if session is own:
                every.append(bound)
            elif session.driver is None:
                every.append(session.bind(binders[session]))
            else:
                every.append(list(session.driver.plan.bound.values()))
                kept |= {task.name: task for task in session.driver.plan.owned.tasks}
        parts, count = [], 0
        for session, found in zip(self.sessions, every, strict=True):
            numbered = [replace(b, task=replace(b.task, index=count + b.task.index)) for b in found]
            parts.append(captured_step(numbered, plain_class(session.optimizer).__name__, session.options))
            count += len(found)
        options = own.options
        owned, _ = run(joined(parts), planning_passes(options))
        self._owned = replace(owned, tasks=tuple(placed_as(t, kept.get(t.name, t)) for t in owned.tasks))
        self._names = [[b.task.name for b in found if self._owned.find(b.task.name)] for found in every]
        check_pieces([b for found in every for b in found], self._owned)
        if options.plan is not None:
            options.plan.check_followed(self.scheduled(options))
        return self._owned

    def scheduled(self, options: Options) -> Step:
        """The SCHEDULED step of all matrices of the chain, each optimizer's after that of the one before it."""
        if self._owned is None:
            raise CanzonaError("there is no plan yet", hint="call step() once; the first step makes the plan")
        kinds = [plain_class(session.optimizer).__name__ for session in self.sessions]
        parts = [lower(self._owned, names, options)[0] for names in self._names]
        return in_sequence([replace(part, optimizer=kind) for part, kind in zip(parts, kinds, strict=True)])


def placed_as(task: Task, other: Task) -> Task:
    """A task with the owner of another one."""
    return replace(task, owner=other.owner, strategy=other.strategy, reason=other.reason)
