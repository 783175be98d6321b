"""A plan at work: which tasks take part in a step, and the steps themselves, the first ones among them."""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor

from canzona_compile.capture.dynamo_oracle import Untraceable
from canzona_compile.capture.external_counters import CounterShadow
from canzona_compile.capture.templates import Capture
from canzona_compile.errors import CanzonaError, InvalidGradient
from canzona_compile.ir.pipeline import Observer
from canzona_compile.ir.program_ops import Watch
from canzona_compile.options import Options
from canzona_compile.runtime.executor import Sources
from canzona_compile.runtime.process_groups import Groups
from canzona_compile.session.bind import check_gradient
from canzona_compile.session.change import ChangeKind, StepChange
from canzona_compile.session.eager_context import PlanContext
from canzona_compile.session.local_step import LocalStep
from canzona_compile.session.make_program import ProgramMaker
from canzona_compile.session.plan import Plan
from canzona_compile.session.program_cache import BoundProgram, ProgramCache, ProgramKey
from canzona_compile.session.state import StateStore
from canzona_compile.session.variant_selection import Lineup, Names, VariantSelection


class Participants(NamedTuple):
    """The tasks with gradients, in the plan's order.

    Attributes:
        ready: those that have state, or need none.
        fresh: those before their first step, which makes their state.
    """

    ready: Names = ()
    fresh: Names = ()


class StepDriver:
    """Takes the steps of one plan on this rank.

    The order of calls: `begin` and `choose_variants` once, `step` for the first step; then for every further step
    `look` and `step`. After every step, and after every error, `end_step`.

    Args:
        capture: the captured code of the optimizer.
        plan: the plan.
        options: of the wrapped optimizer.
        groups: finds process groups.
        rank: this rank, global.
        observers: see every pass that runs.
        watch: waits for the collectives of steps.

    Attributes:
        plan: the plan.
        store: the tensors of its tasks.
        programs: the programs that are kept.
        last: the program that the next step runs again; None if there is none yet, or if nobody knows which.
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
        self.optimizer = optimizer = capture.optimizer
        self.store = StateStore(optimizer, plan, groups, rank)
        self.cohorts = VariantSelection(capture, plan, plan.stagger.ahead if options.stagger else {})
        device = next((p.device for p in self.store.params.values()), torch.device("cpu"))
        context = PlanContext(optimizer, plan, self.store)
        sources = Sources(device, groups, watch, self.store, self.cohorts, context)
        self._maker = ProgramMaker(plan, options, rank, observers, self.store, sources)
        self.programs = ProgramCache(self._maker.of_variants)
        self.last: BoundProgram | None = None
        self._elementwise = LocalStep(optimizer, plan.elementwise)
        self._shadow = CounterShadow(optimizer)
        self._shared = {t.name for t in plan.owned.tasks if t.layout.grid.size > 1}
        self._fused = {b.fused: b.kind.grad_dtype for b in plan.bound.values() if b.fused is not None}
        self._agreed = Participants()  # of the last step
        self._next = Participants()  # of the step that is about to be taken
        self._lineup: Lineup = ()  # the variants of that step
        self._shared_lineup: Lineup = ()  # the part of it that ranks have in common
        self._met: set[Lineup] = set()  # shared lineups that all ranks have agreed on

    # -- before a step -------------------------------------------------------------------------------

    def begin(self) -> dict[str, str]:
        """Take over portable state and the gradients of the first step; a collective if state is resident.

        Returns:
            What each task has, for comparison among ranks: "a gradient", "a first gradient" or "no gradient".

        Raises:
            CanzonaError: the state, or a gradient, does not fit.
        """
        self.store.adopt()
        self._take_pieces()
        self._next = self._agreed = self._participants()
        has = dict.fromkeys(self._next.ready, "a gradient") | dict.fromkeys(self._next.fresh, "a first gradient")
        return {task.name: has.get(task.name, "no gradient") for task in self.plan.owned.tasks}

    def choose_variants(self) -> None:
        """Ask which variants the tasks take on the first step of the plan.

        Raises:
            CanzonaError: the plan does not know the code of the first step.
        """
        try:
            self._consult(self._next.ready)
        except Untraceable as reason:
            raise CanzonaError(f"the plan does not know the code of its first step: {reason}") from reason

    def look(self) -> StepChange | None:
        """Look at what the next step has to do.

        Returns:
            What other ranks must see as well before this step; None in a steady state.

        Raises:
            InvalidGradient: a gradient is one that the plan was not made for.
        """
        if not self._bound():
            return StepChange.replan("the parameters changed")
        self._take_pieces()
        self._check_gradients()
        self._next = self._participants()
        try:
            self._consult(self._next.ready)
        except Untraceable as reason:
            return StepChange.replan(str(reason))
        return self._change()

    def _bound(self) -> bool:
        """Are the optimizer's parameters still the ones of this plan?"""
        params = [id(p) for group in self.optimizer.param_groups for p in group["params"]]
        bound = (b.param if b.fused is None else b.fused.whole for b in self.plan.bound.values())
        return params == list(dict.fromkeys(map(id, bound)))

    def _take_pieces(self) -> None:
        """Give the pieces of fused parameters what those hold; raises InvalidGradient."""
        for fused, expected in self._fused.items():
            if fused.whole.grad is not None:
                check_gradient(fused.whole, fused.name, expected)
            fused.take()

    def _check_gradients(self) -> None:
        """Raise InvalidGradient for a gradient that the plan was not made for."""
        for name, bound in self.plan.bound.items():
            param, grad = bound.param, bound.param.grad
            if grad is None:
                continue
            own = grad._local_tensor if isinstance(grad, DTensor) else grad
            part = param._local_tensor if isinstance(param, DTensor) else param
            expected = bound.kind.grad_dtype
            if own.shape != part.shape or own.dtype != expected or own.layout is not torch.strided:
                check_gradient(param, name, expected)
                raise InvalidGradient("the gradient does not fit its parameter", at=name)

    def _participants(self) -> Participants:
        """The tasks with gradients."""
        present = [name for name, param in self.store.params.items() if param.grad is not None]
        fresh = tuple(n for n in present if n not in self.store.initialised and self._has_first_step(n))
        waiting = set(fresh)
        return Participants(tuple(n for n in present if n not in waiting), fresh)

    def _has_first_step(self, name: str) -> bool:
        """Does a compiled task have state, which an eager first step makes?"""
        kind = self.plan.bound[name].kind
        return kind.oracle is not None and bool(kind.state or kind.python_state)

    def _consult(self, ready: Names) -> None:
        """Ask which variants these tasks take now; raises Untraceable."""
        self.cohorts.consult(ready)
        lineup = self._lineup = self.cohorts.lineup
        common = ((name, label, tuple(n for n in names if n in self._shared)) for name, label, names in lineup)
        self._shared_lineup = tuple(part for part in common if part[2])

    def _change(self) -> StepChange | None:
        """How the next step differs from the ones before it, as far as other ranks are concerned."""
        here, before = {*self._next.ready, *self._next.fresh}, {*self._agreed.ready, *self._agreed.fresh}
        if (here ^ before) & self._shared:
            missing = [t.name for t in self.plan.owned.tasks if t.name in self._shared and t.name not in here]
            return StepChange(ChangeKind.PRESENCE, f"no gradient for {', '.join(missing) or 'none'}")
        if self._shared_lineup in self._met:
            return None
        told = ", ".join(f"{names[0]} and {len(names) - 1} more" for _, _, names in self._shared_lineup)
        return StepChange(ChangeKind.VARIANTS, f"new code for {told}")

    # -- the step ------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Update all parameters once.

        Returns:
            Whether this was the first step of some tasks, or of the plan.

        Raises:
            CanzonaError: a collective broke, or a peer cannot go on.
            Exception: whatever the optimizer's own code raises in an eager step.
        """
        ready, fresh = self._agreed = self._next
        if ready:
            self._met.add(self._shared_lineup)
            self._program(ready).executor.run()
            self.cohorts.show_counters()
            self.store.interpreted(ready)
        if fresh:
            self._first_steps(fresh)
        self._elementwise.step()
        if self.capture.counts:
            self._shadow.count()
        if not fresh and self.last is not None:
            return False
        with contextlib.suppress(Untraceable):  # then the next step will plan anew
            self._foresee(ready, fresh)
        return True

    def end_step(self) -> None:
        """Give fused parameters what their pieces hold. Does nothing where `look` has taken none."""
        for fused in self._fused:
            fused.give_back()

    def _program(self, names: Names) -> BoundProgram:
        """The program in which these tasks take the variants that were chosen; made now if it is new."""
        program = self.last = self.programs.get(ProgramKey(names, self._lineup))
        return program

    def _first_steps(self, fresh: Names) -> None:
        """Make the state of these tasks, by the optimizer's own code."""
        with self.store.first_steps(fresh):
            self._maker.of_first_steps(fresh).executor.run()

    def _foresee(self, ready: Names, fresh: Names) -> None:
        """Make the next step's program now: it is what the report shows."""
        names = {*ready, *fresh}
        ordered = tuple(task.name for task in self.plan.owned.tasks if task.name in names)
        self._consult(ordered)
        self._met.add(self._shared_lineup)
        self._program(ordered)

    def forget_programs(self) -> None:
        """Give up all programs, their buffers and their recordings now."""
        self.programs.forget()
        self.last = None
