"""The optimizers of a chain plan together, so that owners are balanced over the matrices of all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from torch.optim import Optimizer

from canzona_compile.capture.twin import plain_class
from canzona_compile.errors import CanzonaError
from canzona_compile.ir.pipeline import run
from canzona_compile.ir.step import Step
from canzona_compile.options import Options
from canzona_compile.passes import planning_passes
from canzona_compile.session.bind import BoundParam
from canzona_compile.session.plan import captured_step, check_pieces, joined, lower
from canzona_compile.session.sequence import in_sequence
from canzona_compile.session.step_driver import StepDriver


class PlannedSession(Protocol):
    """What is asked of the sessions that plan together; see `Session`."""

    optimizer: Optimizer
    options: Options
    driver: StepDriver | None

    def bind(self) -> list[BoundParam]: ...


class Siblings:
    """Plans the optimizers of a chain together. Each of them steps by a program of its own.

    Args:
        sessions: those of the optimizers, in the order of the chain. Their options differ in names only.
    """

    def __init__(self, sessions: Sequence[PlannedSession]) -> None:
        self.sessions = tuple(sessions)
        self._owned: Step | None = None
        self._names: list[list[str]] = []  # of the tasks of each optimizer

    @property
    def drivers(self) -> list[StepDriver | None]:
        """What takes the steps of each optimizer; None before its first one."""
        return [session.driver for session in self.sessions]

    def owned(self, own: PlannedSession, bound: Sequence[BoundParam]) -> Step:
        """Choose the owners of all matrices of the chain.

        Every session asks when it plans. All of them get the same owners unless something changes in between.

        Args:
            own: the session that plans.
            bound: its parameters.

        Returns:
            The OWNED step of all optimizers.

        Raises:
            CanzonaError: a parameter of another optimizer is not supported, or the given plan does not fit.
        """
        every = [bound if session is own else session.bind() for session in self.sessions]
        parts, count = [], 0
        for session, found in zip(self.sessions, every, strict=True):
            numbered = [replace(b, task=replace(b.task, index=count + b.task.index)) for b in found]
            parts.append(captured_step(numbered, plain_class(session.optimizer).__name__, session.options))
            count += len(found)
        options = own.options
        self._owned, _ = run(joined(parts), planning_passes(options))
        self._names = [[b.task.name for b in found if self._owned.find(b.task.name)] for found in every]
        check_pieces([b for found in every for b in found], self._owned)
        if options.plan is not None:
            options.plan.check_followed(self.scheduled(options))
        return self._owned

    def scheduled(self, options: Options) -> Step:
        """The SCHEDULED step of all matrices of the chain, each optimizer's after that of the one before it.

        Raises:
            CanzonaError: no step was taken yet.
        """
        if self._owned is None:
            raise CanzonaError("there is no plan yet", hint="call step() once; plans are made at the first one")
        kinds = [plain_class(session.optimizer).__name__ for session in self.sessions]
        parts = [lower(self._owned, names, options)[0] for names in self._names]
        return in_sequence([replace(part, optimizer=kind) for part, kind in zip(parts, kinds, strict=True)])
