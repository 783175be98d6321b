"""The session of an optimizer under ZeRO-1: it steps what this rank owns."""

from __future__ import annotations

import contextlib
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor
from torch.distributed.tensor import DTensor

from canzona_compile.data_parallel.engine import Zero1
from canzona_compile.data_parallel.fragment import Fragment
from canzona_compile.data_parallel.model_plan import ModelPlan
from canzona_compile.data_parallel.state import OwnedState, put_together, take_apart
from canzona_compile.ir.layout import Ranks
from canzona_compile.runtime.agreement import Agreement
from canzona_compile.runtime.meeting import Meeting
from canzona_compile.runtime.waiter import Waiter
from canzona_compile.session.bind import Binder, at_parameter
from canzona_compile.session.checkpoints import is_dummy_step
from canzona_compile.session.plan import BoundParam, Plan, make_plan
from canzona_compile.session.planning import BoundBySession, PlannedSession
from canzona_compile.session.session import Session
from canzona_compile.session.state import restoring, whole_leaf
from canzona_compile.session.step_driver import StepDriver


class OwnerSession(Session):
    """Steps the matrices and the slices that this rank owns, on doubles that share their memory.

    The optimizer keeps its parameters. While a plan is in use, `optimizer.state` holds the state of the doubles.
    Portable state is whole and the same on every rank.

    Args:
        planned: the session with which the model was planned, of which this keeps the captures.
        engine: what reduces gradients before a step, and gathers parameters after it. The optimizer joins it.
    """

    lost_in_copies: ClassVar[str] = "copies of an optimizer lose zero1, because a copy of the model has no buckets"
    holds: ClassVar[str] = "what it owns"
    may_move_owners: ClassVar[bool] = False

    def __init__(
        self,
        planned: PlannedSession,
        engine: Zero1,
        model_plan: ModelPlan,
        bound: Mapping[str, BoundParam],
        whole: Agreement,
    ) -> None:
        super().__init__(planned.optimizer, planned.options, capture=planned.capture)
        self._engine: Zero1 = weakref.proxy(engine)  # which holds this session
        self._model_plan, self._bound = model_plan, bound
        self.member = engine.join(self.optimizer, {b.name: b.task.param_group for b in bound.values()})
        self.fragments = tuple(engine.fragments[name] for name in self.member.group_of)
        self._whole = whole
        self._loaded = 0  # how often whole state was loaded
        self._noticed = False  # whether the whole state that is there now is counted
        self._stepped = False  # whether the optimizer has state since
        self._apart = False  # whether `optimizer.state` holds the state of the doubles

    # -- steps -----------------------------------------------------------------------------------------

    def take_step(self) -> bool:
        """Update what this rank owns, and see to it that the parameters are gathered, see `Zero1`."""
        if is_dummy_step(self.optimizer):
            return super().take_step()
        if self._apart and not isinstance(self.optimizer.state, OwnedState):  # the user assigned it
            self.forget_plan()
        with self._taken_back(), self._engine.around(self.member, self.state_text):
            new = super().take_step()
        self._stepped = True
        if isinstance(self.optimizer.state, OwnedState):
            self.optimizer.state.removed.clear()
        return new

    def prepared(self) -> StepDriver:
        """Plan if that is needed, which each rank does on its own, and agree with the other ranks on the step."""
        self._remove()
        driver = super().prepared()
        if not self._in_dummy_step:
            wanted = self.options.skip_nonfinite
            self.skips = self._engine.begun(self.member, self.measuring.text, skips_nonfinite=wanted)
        return driver

    def heard_by(self) -> Iterable[Ranks]:
        """The ranks that step together."""
        return [self._engine.agreement.ranks]

    def nonfinite(self) -> bool:
        """The engine asks, of what all optimizers have."""
        return False

    def state_text(self) -> str:
        """What users did to the state, which they have to do on all ranks. Raises if they replaced some of it."""
        state = self.optimizer.state
        whole = (fragment.name for fragment in self.fragments if not state.get(fragment.param))
        bare = state.changed() if isinstance(state, OwnedState) else set(whole)
        which = "cleared" if len(bare) == len(self.fragments) else f"removed for {', '.join(sorted(bare))}"
        return f"loaded {self._loaded} times" + (f", and {which}" if bare else "")

    def _remove(self) -> None:
        """Remove the state of what this rank owns of the parameters whose state users removed."""
        state = self.optimizer.state
        if not isinstance(state, OwnedState):
            return
        state.removed = state.changed()
        keys = [key for f in self.fragments if f.name in state.removed for key in (f.param, *f.doubles)]
        for view in self.driver.plan.views if keys and self.driver is not None else ():
            keys += view.params if any(view.source is key for key in keys) else ()
        for key in keys:
            state.pop(key, None)

    @contextlib.contextmanager
    def _taken_back(self) -> Iterator[None]:
        """Inside this context, users do not have `optimizer.state`."""
        if isinstance(state := self.optimizer.state, OwnedState):
            state.with_user = False
        try:
            yield
        finally:
            if isinstance(state := self.optimizer.state, OwnedState):
                state.with_user = True

    @contextlib.contextmanager
    def portable_state(self, purpose: str = "state_dict()") -> Iterator[None]:
        with self._taken_back(), super().portable_state(purpose):
            yield

    @contextlib.contextmanager
    def gradients(self) -> Iterator[None]:
        """Inside this context, the doubles have the values and the gradients of what this rank owns."""
        for fragment in self.fragments:
            fragment.lend_marks()
            fragment.lend()
        try:
            yield
        finally:
            for fragment in self.fragments:
                fragment.take_back()

    def _dummy_step(self) -> None:
        with self.gradients():
            super()._dummy_step()

    def _start(self) -> Any:
        take_apart(self.optimizer, self.fragments)
        if not self._in_dummy_step and not isinstance(self.optimizer.state, OwnedState):
            names = {id(fragment.param): fragment.name for fragment in self.fragments}
            self.optimizer.state = OwnedState(self.optimizer.state, names)
        self._apart, self._noticed = True, False
        return super()._start()

    def bind_all(self) -> BoundBySession:
        """Bind what this rank owns."""
        self.capture.rehearse()
        for fragment in self.fragments:
            fragment.lend_marks()
        binder = Binder(self.optimizer, self.options, self.capture)
        bound = [b for fragment in self.fragments for b in self._bind(fragment, binder)]
        bound.sort(key=lambda b: b.task.index)
        return {self: bound}

    def plan_bound(self, every: BoundBySession) -> Plan:
        """Plan the updates of what this rank owns, with the owners of the plan of the model."""
        return make_plan(every[self], self.optimizer_name, self.options, self.observers, self._model_plan.step)

    def _bind(self, fragment: Fragment, binder: Binder) -> Iterator[BoundParam]:
        division, stand_in = fragment.division, fragment.stand_in
        pieces: tuple[BoundParam, ...] = ()
        for at, (part, double) in enumerate(zip(fragment.owned, fragment.doubles, strict=True)):
            known = self._bound[part.name].task
            index, group = known.index, known.param_group
            if division is not None:
                if not pieces:
                    source = division.source if stand_in is None else stand_in.source
                    pieces = binder.describe(index, fragment.name, group, source, stand_in).shown_by(division)
                bound = binder.captured(pieces[at], self.optimizer.state.get(double))
                # The plan treats the double like any other parameter.
                yield replace(bound, task=replace(bound.task, index=index), division=None, stand_in=None)
                continue
            name = f"{fragment.name}[{part.start}:{part.stop}]" if fragment.cut else fragment.name
            view = None if stand_in is None or fragment.cut else stand_in.of(double)
            with at_parameter(fragment.name):
                own = binder.describe(index, name, group, double, view)
                bound = binder.bind_whole(own, binder.state_of(own))
            yield replace(bound, rehearsed=None if view else fragment.param)

    # -- state -----------------------------------------------------------------------------------------

    def partners(self) -> dict[Ranks, str]:
        """Find the sets of ranks that portable state is gathered from: all data-parallel ranks if not yet gathered."""
        found = super().partners()
        if self._apart and self._whole.ranks:
            names = "\n".join(fragment.name for fragment in self.fragments)
            found[self._whole.ranks] = f"{self.state_text()}\n{names}\n{found.get(self._whole.ranks, '')}"
        return found

    def sharing(self) -> dict[Ranks, Callable[[str], list[str]]]:
        """Find the sets of ranks that share tasks, or the model's buckets, with this one."""
        return super().sharing() | ({self._whole.ranks: self._whole.share} if self._whole.ranks else {})

    def meeting_of(self, ranks: Ranks) -> Meeting:
        """Return the meetings of some ranks with which this rank shares state."""
        own = self._whole.meeting if self._whole.ranks == ranks else None
        return own or super().meeting_of(ranks)

    @property
    def has_objects(self) -> bool:
        return self._stepped and any(bound.kind.maker is not None for bound in self._bound.values())  # on any rank

    def leave(self) -> None:
        """Put whole state into `optimizer.state` and drop the plan. This is a collective.

        A new plan in mid-run needs `release` alone, which leaves each rank the state of what it owns.
        """
        with self._taken_back():
            self._remove()
            super().leave()
            if self._apart:  # also on a rank that owns nothing, because the others wait for it
                self._put_together()
                self._apart = False
            if isinstance(self.optimizer.state, OwnedState):
                self.optimizer.state = defaultdict(dict, self.optimizer.state)

    def forget_plan(self) -> None:
        """Drop the plan. If state was loaded just before, it is whole."""
        super().forget_plan()
        state = self.optimizer.state
        if not isinstance(state, OwnedState) and any(state.get(f.param) for f in self.fragments):
            self._apart = False
            self._loaded += not self._noticed
            self._noticed = True

    def _whole_leaf(self, piece: str, name: str, value: DTensor) -> Tensor:
        """Gather a leaf of a piece from the other ranks that hold its fragments. This is a collective."""
        assert self._agreements is not None
        return whole_leaf(self._bound[piece].task, name, value, self.groups, self.rank, self._agreements.waiter)

    @contextlib.contextmanager
    def gathered_state(self) -> Iterator[None]:
        """Inside this context, `optimizer.state` holds what the unwrapped optimizer would hold, on every rank.

        Entering it is a collective.
        """
        if not self._apart:
            yield
            return
        self._remove()
        with super().gathered_state(), restoring(self.optimizer):
            self._put_together()
            yield

    def _put_together(self) -> None:
        """Gather whole state. All ranks have met for that, so an error here leaves some of them in a collective."""
        with self._whole.on_its_way():
            watch = Waiter(self._whole.boards, self.device)
            put_together(self.optimizer, self.fragments, self._engine.group, self._whole_leaf, watch)
