"""Wrapped chains: their optimizers are wrapped, and `chain.canzona` shows them as one."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from torch.optim import Optimizer

from canzona_compile.api.chain import Chain, loss_of
from canzona_compile.api.handle import Canzona, Zero1Canzona
from canzona_compile.api.wrapped_class import rebind_scheduled_step
from canzona_compile.compat.torch_private import calls_outside_dynamo, outside_dynamo
from canzona_compile.ir.plan_file import PlanFile
from canzona_compile.ir.sequence import in_sequence
from canzona_compile.ir.step import Step
from canzona_compile.replica.raised import freed_on_error
from canzona_compile.session.planning import Siblings
from canzona_compile.session.session import Session, all_ready


class MemberCanzona(Canzona):
    """`optimizer.canzona` of an optimizer that is part of a chain: the chain tells what the first step does."""

    new = False  # whether the chain has something to tell

    def shown(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def log_headline(self) -> None:
        self.new = True


@calls_outside_dynamo
class ChainCanzona(Canzona):
    """`chain.canzona`: the graphs, passes, plan and report of all optimizers of a chain.

    It has `sessions` in place of `session`. A report and a plan are those of the matrices of all optimizers.

    Args:
        optimizers: those of the chain, wrapped.

    Attributes:
        parts: what each optimizer has as `.canzona`, in the order of the chain.
    """

    looks_ahead: ClassVar[bool] = True  # whether all optimizers are ready before the first one steps

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.parts: tuple[Canzona, ...] = parts_of(optimizers)
        for session in self.sessions:
            session.turns = self.sessions[0].turns
        self._plan_together()

    def _plan_together(self) -> None:
        """Let the sessions choose owners together."""
        self._siblings = Siblings(self.sessions)

    @property
    def sessions(self) -> list[Session]:
        """What takes the steps of each optimizer."""
        return [part.session for part in self.parts]

    def reported(self) -> Step:
        """The scheduled step that the report shows: what the next `step()` runs, one optimizer after the other.

        Raises:
            CanzonaError: there was no step yet.
        """
        return in_sequence([session.reported() for session in self.sessions])

    def plan(self) -> PlanFile:
        """Owners and micro-groups of the matrices of all optimizers: wrap(chain, plan=) follows them.

        Raises:
            CanzonaError: there was no step yet.
        """
        return PlanFile.of(self._siblings.scheduled(self.sessions[0].options))

    def dump_step(self, folder: Path) -> None:
        """Write every form of each optimizer's step and the generated code to files in a folder per optimizer."""
        for i, part in enumerate(self.parts):
            part.dump_step(folder / f"{i}_{part.session.optimizer_name}")

    @contextlib.contextmanager
    def ready(self) -> Iterator[None]:
        """Inside this context all optimizers take a step. What one of them refuses, none has begun.

        Each optimizer finds out at its own turn under ZeRO-1, and if its hooks change what its step does.
        """
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.sessions[0].turns.take())
            stack.enter_context(self.shown())
            if self.looks_ahead and not any(session.takes_dummy_step() for session in self.sessions):
                stack.enter_context(all_ready(self.sessions))
            yield
        if self._has_news():
            self.log_headline()

    def _has_news(self) -> bool:
        """Tell whether an optimizer has something new to report, once."""
        members = [part for part in self.parts if isinstance(part, MemberCanzona)]
        news = any(part.new for part in members)
        for part in members:
            part.new = False
        return news


class Zero1ChainCanzona(Zero1Canzona, ChainCanzona):
    """`chain.canzona` under ZeRO-1: that of the chain, and what is done to all gradients of the model."""

    looks_ahead = False  # each optimizer announces its own step
    parts: tuple[Zero1Canzona, ...]

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        ChainCanzona.__init__(self, optimizers)
        self.zero1, self.model_plan = self.parts[0].zero1, self.parts[0].model_plan

    def _plan_together(self) -> None:
        """`zero1` has planned the whole model already."""

    def reported(self) -> Step:
        """The scheduled step of all optimizers on all ranks, with the buckets."""
        for session in self.sessions:
            session.last()
        kinds = [session.optimizer_name for session in self.sessions]
        return replace(self.sessions[0].reported(), optimizer="+".join(kinds))  # the plan names those with matrices


class CanzonaChain(Chain):
    """The class of a chain whose optimizers are wrapped; see `ChainCanzona.ready` for what it does more."""

    _canzona_plain_class = Chain
    canzona: ChainCanzona

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all optimizers in order, see `Chain.step`."""
        loss = loss_of(closure)
        with freed_on_error(), self.canzona.ready():
            self.step_all()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """The state of all optimizers between two steps, see `Chain.state_dict`."""
        with self.canzona.sessions[0].turns.lock:
            return super().state_dict()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the optimizers of a copy or a pickle."""
        super().__setstate__(state)
        for own in self.optimizers:
            own.canzona = MemberCanzona(own.canzona.session)  # type: ignore[attr-defined]
        attach_chain(self)


# Optimizer.__init__ does this to a class on first use. A train step that is compiled as a whole breaks here.
hooked: Any = outside_dynamo(Optimizer.profile_hook_step(CanzonaChain.step))
hooked.hooked = True
CanzonaChain.step = hooked  # type: ignore[method-assign]


def parts_of(optimizers: Sequence[Optimizer]) -> tuple[Canzona, ...]:
    """What wrapped optimizers have as `.canzona`."""
    return tuple(own.canzona for own in optimizers)  # type: ignore[attr-defined]


def handle_of(optimizers: Sequence[Optimizer], known: Any = None) -> ChainCanzona:
    """Make the handle of optimizers that are wrapped. The known one stays if it is theirs as they are wrapped now."""
    parts = parts_of(optimizers)
    if isinstance(known, ChainCanzona) and [*map(id, known.parts)] == [*map(id, parts)]:
        return known
    return (Zero1ChainCanzona if isinstance(parts[0], Zero1Canzona) else ChainCanzona)(optimizers)


def attach_chain(chain: Chain) -> None:
    """Give a chain whose optimizers are wrapped its class and its handle."""
    chain.__class__ = CanzonaChain
    chain.canzona = handle_of(chain.optimizers, vars(chain).get("canzona"))  # type: ignore[attr-defined]
    for part in parts_of(chain.optimizers):
        part.chain = weakref.ref(chain)
    rebind_scheduled_step(chain)


def detach_chain(chain: Chain) -> None:
    """Give a chain whose optimizers are no longer wrapped its old class."""
    chain.__class__ = Chain
    del chain.canzona  # type: ignore[attr-defined]
    rebind_scheduled_step(chain)
