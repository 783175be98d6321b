"""Take the steps of a plan: find the tasks that take part, run their programs, and run first steps eagerly."""

from __future__ import annotations

import contextlib
import enum
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import is_
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor

from canzona_compile.capture.templates import Capture
from canzona_compile.compat.interrupts import uninterrupted
from canzona_compile.compat.telling import tell
from canzona_compile.eager.cell import Shadow
from canzona_compile.errors import CanzonaError
from canzona_compile.ir.layout import Ranks
from canzona_compile.ir.options import Options
from canzona_compile.ir.pipeline import Observer
from canzona_compile.ir.program_ops import Watch
from canzona_compile.replica.raised import Untraceable
from canzona_compile.replica.twin import make_twin, step_plainly
from canzona_compile.runtime.executor import Sources
from canzona_compile.runtime.process_groups import Groups
from canzona_compile.runtime.step_clock import StepClock, during
from canzona_compile.session.audit import Audit
from canzona_compile.session.cells import Cells
from canzona_compile.session.gradients import StepGradients
from canzona_compile.session.plan import BoundParam, Plan
from canzona_compile.session.program_cache import BoundProgram, ProgramCache, ProgramKey, ProgramMaker
from canzona_compile.session.state import StateStore, put
from canzona_compile.session.variant_selection import (
    Names,
    SharedNumbers,
    VariantAssignment,
    VariantSelection,
)
from canzona_compile.tensors import local_part

log = logging.getLogger(__name__)


class ChangeKind(enum.Enum):
    """What a change requires before the step can run."""

    REPLAN = enum.auto()  # it requires a new plan
    PRESENCE = enum.auto()  # it requires a program for other tasks
    VARIANTS = enum.auto()  # it requires a program for other variants


@dataclass(frozen=True, slots=True)
class StepChange:
    """A change that ranks compare before they go on.

    Attributes:
        text: what changed. Errors show it.
        among: by set of ranks that share some of what changed, the part that they share. Others have other names.
        elsewhere: what all other ranks see of it; empty if it does not concern them. None if everybody sees `text`.
    """

    kind: ChangeKind
    text: str
    among: Mapping[Ranks, str] = field(default_factory=dict)
    elsewhere: str | None = None

    def seen_by(self, ranks: Ranks) -> str:
        """What these ranks compare: if they saw the same change, they have the same text."""
        return self.among.get(ranks, self.text if self.elsewhere is None else self.elsewhere)

    @classmethod
    def replan(cls, reason: str) -> StepChange:
        """Make the change that requires a new plan, for this reason."""
        log.info("a new plan: %s", reason)
        return cls(ChangeKind.REPLAN, f"re-plan: {reason}")


class Participants(NamedTuple):
    """The tasks with gradients, in the plan's order.

    Attributes:
        fresh: the tasks that have not taken their first step, which creates their state.
    """

    ready: Names = ()
    fresh: Names = ()


class StepDriver:
    """Takes the steps of one plan on this rank.

    The caller calls `begin` and `choose_variants` once, and then `step` for the first step. For every further step it
    calls `look` and then `step`. After every step, and after every error, it calls `end_step`.

    Attributes:
        first_buffers: the most bytes of buffers that a program of first steps had. It gave them back.
        clock: notes the acts of a step that is measured; None otherwise.
        last: the program that the next step runs if nothing changes; None if none is known.
    """

    def __init__(
        self,
        capture: Capture,
        plan: Plan,
        options: Options,
        groups: Groups,
        rank: int,
        observers: list[Observer],
        watch: Watch,
    ) -> None:
        self.capture, self.plan = capture, plan
        optimizer = capture.optimizer
        self._groups = [list(group["params"]) for group in optimizer.param_groups]  # for which the plan was made
        self.gradients = StepGradients(capture, plan)
        self.store = StateStore(optimizer, plan, self.gradients, groups, rank, watch)
        self.variants = VariantSelection(capture, plan, plan.stagger.ahead if options.stagger else {})
        device = next((p.device for p in self.store.params.values()), torch.device("cpu"))
        self._cells = Cells(self.store)
        sources = Sources(device, groups, watch, self.store, self.variants, self._cells)
        self.maker = ProgramMaker(options, observers, self.store, sources)
        self.programs = ProgramCache()
        self.first_buffers = 0
        self.last: BoundProgram | None = None
        self.clock: StepClock | None = None
        self._shadow = Shadow()
        self._numbers = SharedNumbers(plan)
        shared = [task for task in plan.owned.tasks if task.layout.grid.size > 1]
        self._shared = {task.name: tuple(sorted(task.layout.grid.members())) for task in shared}
        self._audit = None if options.audit is None else Audit(options.audit, self.store)
        capture.watch.hold({name: bound.origin for name, bound in plan.bound.items()})
        self._agreed = self._next = Participants()  # of the last step, and of the next one
        self._assignment: VariantAssignment = ()  # the variants of the next step
        self._shared_assignment: dict[Ranks, VariantAssignment] = {}  # of it, what each set of ranks shares
        self._stepped: set[str] = set()  # tasks that have taken a step
        self._transitional = {name for name, bound in plan.bound.items() if bound.kind.transitional}
        self._met: set[tuple[Ranks, VariantAssignment]] = set()  # those that all of these ranks have agreed on

    @property
    def shares(self) -> bool:
        """Whether this rank shares tasks with others."""
        return bool(self._shared)

    # -- before a step -------------------------------------------------------------------------------

    def begin(self) -> dict[str, str]:
        """Take over portable state and the gradients of the first step. A collective if owners are to hold state.

        Returns:
            By task, what it has: "a gradient", "a first gradient" or "no gradient"; with the dtype, if that is not the
            dtype of the parameter. Ranks compare this.
        """
        self.store.adopt()
        self.gradients.read()
        self._next = self._agreed = self._participants()
        has = dict.fromkeys(self._next.ready, "a gradient") | dict.fromkeys(self._next.fresh, "a first gradient")
        return {
            task.name: has.get(task.name, "no gradient") + self._odd_dtype(task.name) for task in self.plan.owned.tasks
        }

    def _odd_dtype(self, name: str) -> str:
        """Say in which dtype the gradient of a task is, if that is not the dtype of its parameter."""
        bound = self.plan.bound[name]
        dtype = bound.kind.grad_dtype
        return "" if dtype == bound.param.dtype else f" in {dtype}".replace("torch.", "")

    def check(self) -> None:
        """Check the gradients of the first step of the plan, after `begin`, and make optimizer objects of matrices."""
        self.gradients.check()
        self.gradients.check_presence(self._next.ready)
        self._cells.begin()

    def choose_variants(self) -> None:
        """Ask which variants the tasks take on the first step of the plan."""
        try:
            self._consult(self._next.ready)
        except Untraceable as reason:
            raise CanzonaError(f"the plan does not know the code of its first step: {reason}") from reason

    @uninterrupted  # one context for all that a look does: entering one asks for the signal handler
    def look(self) -> StepChange | None:
        """Find out what the next step has to do.

        Returns:
            A change that the other ranks must see as well before this step; None if nothing changed.
        """
        watch = self.capture.watch
        if not self._bound():
            return StepChange.replan("the parameters changed")
        if watch.replaced():
            return StepChange.replan("the memory or the attributes of parameters were replaced")
        if self._transitional & self._stepped:
            return StepChange.replan("the state of parameters has a new form")
        if self.capture.notice():
            return StepChange.replan("attributes of the optimizer changed, and it now runs in another way")
        if cleared := watch.cleared():
            self.store.forget(cleared)
            self.forget_programs()
        elif watch.grown():
            return StepChange.replan("the state of parameters has new entries")
        self.gradients.read()
        self.gradients.check()
        self._next = self._participants()
        self.gradients.check_presence(self._next.ready)
        try:
            self._consult(self._next.ready)
        except Untraceable as reason:
            return StepChange.replan(str(reason))
        return self._change()

    def _bound(self) -> bool:
        """Tell whether the optimizer still has the parameters of this plan, each in its group."""
        now, own = [group["params"] for group in self.capture.optimizer.param_groups], self._groups
        return list(map(len, now)) == list(map(len, own)) and all(map(is_, chain(*now), chain(*own)))

    def _participants(self) -> Participants:
        """Find the tasks that have gradients now."""
        present = [name for name in self.store.params if name in self.gradients.found]
        fresh = tuple(n for n in present if n not in self.store.initialised and self._has_first_step(n))
        waiting = set(fresh)
        return Participants(tuple(n for n in present if n not in waiting), fresh)

    def _compiled(self, name: str) -> bool:
        return self.plan.bound[name].kind.recorder is not None

    def _has_first_step(self, name: str) -> bool:
        """Tell whether a task takes an eager first step: it is compiled, and it has state."""
        kind = self.plan.bound[name].kind
        return self._compiled(name) and bool(kind.state or kind.python_state)

    def _consult(self, ready: Names) -> None:
        """Ask which variants these tasks take on this step; may raise Untraceable."""
        self.variants.consult(ready, self.gradients.found)
        if self._assignment == self.variants.assignment:
            return
        self._assignment = self.variants.assignment
        found: dict[Ranks, list[tuple[str, int, Names]]] = {}
        for template, label, names in self._assignment:
            for ranks, own in self._by_ranks(names).items():
                found.setdefault(ranks, []).append((template, label, tuple(own)))
        self._shared_assignment = {ranks: tuple(own) for ranks, own in found.items()}

    def numbers(self) -> dict[Ranks, str]:
        """Describe the numbers that the next step reads, for each set of ranks that shares tasks."""
        return self._numbers.text(self.capture.optimizer.param_groups, self.variants.current)

    def facing(self) -> tuple[object, ...]:
        """What the next step is, as `look` found it: two that are equal are the same step."""
        return self._next, self._assignment, self.numbers()

    def _change(self) -> StepChange | None:
        """Describe how the next step differs from earlier ones in what other ranks share with this one."""
        if anew := self._by_ranks(n for n in self._next.fresh if n in self._stepped):
            told = {ranks: f"the state of {', '.join(names)} was cleared" for ranks, names in anew.items()}
            return StepChange(ChangeKind.PRESENCE, "; ".join(told.values()), told, "state was cleared")
        if self._next != self._agreed:
            here, before = ({*step.ready, *step.fresh} for step in (self._next, self._agreed))
            if changed := self._by_ranks(here ^ before):
                bare = self._by_ranks(t.name for t in self.plan.owned.tasks if t.name not in here)
                told = {ranks: f"no gradient for {', '.join(bare.get(ranks, ())) or 'none'}" for ranks in changed}
                return StepChange(ChangeKind.PRESENCE, "; ".join(told.values()), told, "other gradients are there")
        told = {
            ranks: f"new code for {', '.join(f'{names[0]} and {len(names) - 1} more' for _, _, names in own)}"
            for ranks, own in self._shared_assignment.items()
            if (ranks, own) not in self._met
        }
        return StepChange(ChangeKind.VARIANTS, "; ".join(told.values()), told, "") if told else None

    def _by_ranks(self, names: Iterable[str]) -> dict[Ranks, list[str]]:
        """Those of these tasks that other ranks share, by the ranks that do."""
        found: dict[Ranks, list[str]] = {}
        for name in filter(self._shared.__contains__, names):
            found.setdefault(self._shared[name], []).append(name)
        return found

    # -- the step ------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Update all parameters once."""
        ready, fresh = self._agreed = self._next
        if ready:
            self._met.update(self._shared_assignment.items())
            expected = [] if self._audit is None else self._audit.before(ready)
            with during(self.clock, "plan"):
                program = self._program(ready)
            self._run(program)
            if self._audit is not None:
                self._audit.after(expected)
            self.variants.show_counters()
            self.store.interpreted(ready)
        if fresh:
            self._first_steps(fresh)
        with during(self.clock, "local"):
            self._step_locally()
        if self.capture.counts:
            self._shadow.count(self.capture.optimizer)
        if fresh or not self._stepped:
            own = {n: self.store.params[n] for n in self.store.initialised if self._compiled(n)}
            self.capture.watch.hold_state(own)
        self._stepped = set(self.store.initialised)
        self.gradients.leave((*ready, *fresh))
        if not fresh and self.last is not None:
            return False
        with contextlib.suppress(Untraceable):  # the next step will make a new plan then
            self._foresee(ready, fresh)
        return True

    def end_step(self) -> None:
        """Let go of the gradients of this step, and of what views hold as copies."""
        self.gradients.forget()

    def _program(self, names: Names) -> BoundProgram:
        """Return the program in which these tasks take the chosen variants; make it if it is new."""
        program = self.last = self.programs.get(ProgramKey(names, self._assignment), self.maker.of_variants)
        return program

    def _first_steps(self, fresh: Names) -> None:
        """Create the state of these tasks by running the optimizer's own code."""
        with self.store.first_steps(fresh):
            program = self.maker.of_first_steps(fresh)
            self.first_buffers = max(self.first_buffers, sum(program.executor.program.slots))
            tell(f"taking the first step of {len(fresh)} matrices")
            self._run(program)

    def _step_locally(self) -> None:
        """Run the optimizer's own step for the parameters whose update is elementwise, each rank on its own fragments.

        The optimizer sees DTensors as DTensors and not as plain fragments, because its code may read the parameter's
        shape.
        """
        present = [b for b in self.plan.elementwise if b.task.name in self.gradients.found]
        parts: Iterable[Sequence[BoundParam]] = [present]
        if self.plan.rules is not None:
            values = (value for group in self.capture.optimizer.param_groups for value in group.values())
            if not any(isinstance(value, torch.Tensor) for value in values):  # a step writes to such a value once
                parts = portions(present, self.maker.options.any_capacity)
        for part in parts if present else ():
            self._step_part(part)

    def _step_part(self, present: Sequence[BoundParam]) -> None:
        """Take the local step of some parameters."""
        state, store = self.capture.optimizer.state, self.store
        before = {b.param: state[b.param] for b in present if b.param in state}
        own = {b.param: store.unstored(b.task.name, before[b.param]) for b in present if b.param in before}
        twin = make_twin(self.capture.optimizer, {}, [], own)
        groups = sorted({b.task.param_group for b in present})
        twin.param_groups = [
            {**self.capture.optimizer.param_groups[g], "params": [b.param for b in present if b.task.param_group == g]}
            for g in groups
        ]
        doubles = [(b.param, b.param.data) for b in present if b.rehearsed is not None]
        step_plainly(twin)
        for param, memory in doubles:  # a step that assigns to `.data` moves a double out of the memory of its bucket
            if not isinstance(param, DTensor) and param.data_ptr() != memory.data_ptr():
                param.data = memory.copy_(param.data)
        for b in (b for b in present if b.param in twin.state):
            new = store.stored(b.task.name, twin.state[b.param], before.get(b.param))
            if b.param in before and new is not before[b.param]:
                put(before[b.param], new)
            else:
                state[b.param] = new

    def _run(self, program: BoundProgram) -> None:
        if self.clock is None:
            program.executor.run()
        else:
            with self.clock.during("plan"):
                program.executor.timed()
            program.executor.run_timed(self.clock)

    def _foresee(self, ready: Names, fresh: Names) -> None:
        """Make the program of the next step now, because the report shows it."""
        names = {*ready, *fresh}
        ordered = tuple(task.name for task in self.plan.owned.tasks if task.name in names)
        self._consult(ordered)
        self._met.update(self._shared_assignment.items())
        self._program(ordered)

    def forget_programs(self) -> None:
        """Drop all programs, their buffers and their recordings."""
        self.programs.forget()
        self.last = None

    def release(self) -> None:
        """Put the state into portable form, see `StateStore.release`. The memory of programs may serve that."""
        self.gradients.give_back()
        self.forget_programs()
        self.store.release()


def portions(bound: Sequence[BoundParam], capacity: int) -> Iterator[list[BoundParam]]:
    """Divide parameters into portions of at most so many bytes; their state is opened portion by portion."""
    portion, size = list[BoundParam](), 0
    for own in bound:
        nbytes = local_part(own.param).nbytes
        if portion and size + nbytes > capacity:
            yield portion
            portion, size = [], 0
        portion.append(own)
        size += nbytes
    if portion:
        yield portion
