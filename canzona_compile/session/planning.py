"""The part of a session that binds parameters and plans their updates, together with the other optimizers of a chain.

Owners are balanced over the matrices of all of them. Each steps by a program of its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch.optim import Optimizer

from canzona_compile.capture.templates import Capture
from canzona_compile.compat.optimizer_class import plain_class
from canzona_compile.errors import CanzonaError
from canzona_compile.ir.layout import Ranks
from canzona_compile.ir.options import Options
from canzona_compile.ir.pipeline import Observer, PassHistory, run
from canzona_compile.ir.plan_file import PlanFile
from canzona_compile.ir.sequence import in_sequence
from canzona_compile.ir.step import Step, Task
from canzona_compile.passes import planning_passes
from canzona_compile.session.bind import Binder
from canzona_compile.session.params import check_differentiable, check_params, named_params, notice_data_parallel
from canzona_compile.session.plan import BoundParam, Plan, captured_step, check_pieces, joined, lower, make_plan, whole
from canzona_compile.session.portable_state import PortableState
from canzona_compile.views.given_layout import check_marked


class PlannedSession(PortableState):
    """The part of a session that binds parameters and plans their updates.

    Attributes:
        observers: callables that see every pass, see `ir.pipeline`; users may add their own.
        number: of the steps that have begun.
        shared: the sets of ranks with which the last plan shares tasks; None if there was no plan yet.
        siblings: the sessions that plan together; one that is in no chain plans alone.
    """

    def __init__(self, optimizer: Optimizer, options: Options, capture: Capture | None = None) -> None:
        super().__init__(optimizer)
        self.options = options
        self.capture = capture or Capture(optimizer, options.one_per_matrix)
        self.observers: list[Observer] = []
        self.number = 0
        self.shared: tuple[Ranks, ...] | None = None
        self._in_dummy_step = False  # whether this is a dummy step
        self.siblings = Siblings([self])

    @property
    def named(self) -> list[tuple[str, int, torch.Tensor]]:
        """The parameters with their names and the indices of their groups, see `named_params`."""
        return named_params(self.optimizer, self.options.names, self.options.prefix)

    @property
    def optimizer_name(self) -> str:
        """The name of the class of the optimizer, as the user wrote it."""
        return plain_class(self.optimizer).__name__

    def exchanged(self) -> Binder:
        """Make what binds the parameters. This is a collective if some of them are plain fragments.

        It comes before anything that may raise, because other ranks wait for it.
        """
        return Binder(self.optimizer, self.options, self.capture).exchanged()

    def bind(self, binder: Binder, refused: dict[str, CanzonaError] | None = None) -> list[BoundParam]:
        """Bind the parameters.

        Args:
            refused: gets the errors of single parameters, by name, which are not bound then; None to raise them.
        """
        check_differentiable(self.optimizer)
        check_params(self.named, refused)
        bound = binder.bind(refused)
        groups = (group for session in self.siblings.sessions for group in session.optimizer.param_groups)
        check_marked(self.options.layout, (param for group in groups for param in group["params"]))
        return bound

    def bind_all(self) -> BoundBySession:
        """Bind the parameters, and those of others of a chain that have no plan yet. In a dummy step, only its own."""
        if self._in_dummy_step:
            return {self: self.bind(self.exchanged())}
        binders = self.siblings.exchanged(self)
        return self.siblings.bind(self, self.bind(binders[self]), binders)

    def plan_bound(self, every: BoundBySession) -> Plan:
        """Plan the updates of the parameters."""
        siblings, bound = self.siblings, every[self]
        owned_as = None if self._in_dummy_step else siblings.owned(self, every)
        complete = len(siblings.sessions) == 1
        plan = make_plan(bound, self.optimizer_name, self.options, self.observers, owned_as, complete)
        if self.number == 1 and self.options.replicate is None:
            notice_data_parallel(plan.owned, [param for _, _, param in self.named])
        if self.options.plan is not None and owned_as is None:
            self.options.plan.check_followed(whole(plan, self.options))
        return plan

    def last(self) -> tuple[Step, PassHistory]:
        """Return the emitted step that the next `step()` runs if nothing changes, and the passes that made it."""
        if self.driver is None or self.driver.last is None:
            raise no_plan()
        return self.driver.last.step, self.driver.last.history

    def plan(self) -> PlanFile:
        """Return the decisions of the current plan, for all of its matrices.

        Raises:
            CanzonaError: no step was taken yet.
        """
        self.last()
        assert self.driver is not None
        return PlanFile.of(whole(self.driver.plan, self.options))

    def sharing(self) -> dict[Ranks, Callable[[str], list[str]]]:
        """Find the sets of ranks that this rank shares tasks with, and what gathers a text from all ranks of each.

        In a chain, those with which any of its optimizers does: an elementwise one shares none by itself.
        """
        assert self._agreements is not None
        drivers = [session.driver for session in self.siblings.sessions]
        found = [ranks for driver in drivers if driver is not None for ranks in driver.numbers()]
        return {ranks: self._agreements.of(ranks).share for ranks in dict.fromkeys(found)}


Binders = Mapping[PlannedSession, Binder]  # of those whose parameters are bound now
BoundBySession = Mapping[PlannedSession, list[BoundParam]]


class Siblings:
    """The sessions of the optimizers of a chain, in its order, which plan together: one without a chain is alone.

    Args:
        sessions: of options that differ in names only, see `plan_together`.
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
        return " and ".join(session.optimizer_name for session in self.sessions)

    def exchanged(self, own: PlannedSession) -> Binders:
        """Make what binds the parameters of the session that plans, and of those that have no plan yet.

        This is a collective as `PlannedSession.exchanged` is.
        """
        return {session: session.exchanged() for session in self.sessions if session is own or session.driver is None}

    def bind(self, own: PlannedSession, bound: list[BoundParam], binders: Binders) -> BoundBySession:
        """Bind the parameters of those that have no plan yet, beside what the session that plans has bound."""
        others = [session for session in self.sessions if session is not own and session.driver is None]
        return {own: bound} | {session: session.bind(binders[session]) for session in others}

    def owned(self, own: PlannedSession, bound: BoundBySession) -> Step | None:
        """Choose the owners of all matrices of the chain; none for a session that is alone.

        Every session asks when it plans. All of them get the same owners unless something changes in between. What a
        session has planned already stays: its owners hold state.
        """
        if len(self.sessions) == 1:
            return None
        every: list[Sequence[BoundParam]] = []
        kept: dict[str, Task] = {}
        for session in self.sessions:
            if session in bound:
                every.append(bound[session])
            else:
                assert session.driver is not None
                every.append(list(session.driver.plan.bound.values()))
                kept |= {task.name: task for task in session.driver.plan.owned.tasks}
        parts, count = [], 0
        for session, found in zip(self.sessions, every, strict=True):
            numbered = [replace(b, task=replace(b.task, index=count + b.task.index)) for b in found]
            parts.append(captured_step(numbered, session.optimizer_name, session.options))
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
            raise no_plan()
        kinds = [session.optimizer_name for session in self.sessions]
        parts = [lower(self._owned, names, options)[0] for names in self._names]
        return in_sequence([replace(part, optimizer=kind) for part, kind in zip(parts, kinds, strict=True)])


def plan_together(sessions: Sequence[PlannedSession]) -> None:
    """Let sessions choose owners together."""
    siblings = Siblings(sessions)
    for session in sessions:
        session.siblings = siblings


def placed_as(task: Task, other: Task) -> Task:
    """A task with the owner of another one."""
    return replace(task, owner=other.owner, strategy=other.strategy, reason=other.reason)


def no_plan() -> CanzonaError:
    """The error for what only a plan tells."""
    return CanzonaError("there is no plan yet", hint="call step() once; the first step makes the plan")
