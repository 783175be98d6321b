"""Wrapped chains: their optimizers are wrapped, and `chain.canzona` shows them as one."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from canzona_compile.api.chains.chain import Chain, loss_of
from canzona_compile.api.handle import Canzona, dump_plan
from canzona_compile.api.wrapped_class import rebind_scheduled_step
from canzona_compile.api.zero1_handle import Zero1Canzona
from canzona_compile.compat.optimizer_class import plain_class
from canzona_compile.compat.telling import SOON, shown
from canzona_compile.compat.torch_private import calls_outside_dynamo, outside_dynamo
from canzona_compile.ir.pipeline import PassHistory
from canzona_compile.ir.plan_file import PlanFile
from canzona_compile.ir.sequence import in_sequence, names_in_sequence
from canzona_compile.ir.step import Step
from canzona_compile.report.build import Report, headline, make_report
from canzona_compile.report.explain import Explanation, explain_all
from canzona_compile.report.run_facts import facts_of_all, has_matrices
from canzona_compile.session.session import Session
from canzona_compile.session.siblings import Siblings

log = logging.getLogger(__name__)


class MemberCanzona(Canzona):
    """`optimizer.canzona` of an optimizer that is part of a chain: the chain tells what the first step does."""

    new = False  # whether the chain has something to tell

    def shown(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def log_headline(self) -> None:
        self.new = True


@calls_outside_dynamo
class ChainCanzona:
    """`chain.canzona`: the graphs, passes, plan and report of all optimizers of a chain.

    It has the methods of `Canzona`, and `sessions` in place of `session`. A report and a plan are those of the matrices
    of all optimizers.

    Args:
        optimizers: those of the chain, wrapped.

    Attributes:
        parts: what each optimizer has as `.canzona`, in the order of the chain.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.parts: tuple[Canzona, ...] = parts_of(optimizers)
        self._plan_together()

    def _plan_together(self) -> None:
        """Let the sessions choose owners together."""
        self._siblings = Siblings(self.sessions)
        for session in self.sessions:
            session.siblings = self._siblings

    @property
    def sessions(self) -> list[Session]:
        """What takes the steps of each optimizer."""
        return [part.session for part in self.parts]

    def release(self) -> None:
        """Leave all optimizers as they would be if they had never been wrapped. A collective if owners hold state."""
        for part in self.parts:
            part.release()

    def consolidate(self, to: int = 0) -> None:
        """Gather the state of all optimizers to one rank, see `Canzona.consolidate`."""
        for part in self.parts:
            part.consolidate(to)

    def graph(self, stage: str = "program", template: str | None = None) -> nn.Module:
        """A stage's graph, see `Canzona.graph`; without a template that of the first optimizer with matrices.

        Raises:
            CanzonaError: there was no step yet, or there is no such stage or template.
        """
        if template is None:
            return self._busy().graph(stage)
        names = names_in_sequence([part.step for part in self.parts])
        number, own = names.get(template, (0, template))
        return self.parts[number].graph(stage, own)

    @property
    def step(self) -> Step:
        """The last step of the first optimizer with matrices; `parts` has the others."""
        return self._busy().step

    def passes(self) -> PassHistory:
        """What each pass did to the step of the first optimizer with matrices; `parts` has the others."""
        return self._busy().passes()

    def _busy(self) -> Canzona:
        """Find the first optimizer with matrices; raise if there was no step."""
        for part in self.parts:
            part.session.last()
        return next((part for part in self.parts if has_matrices(part.session)), self.parts[0])

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

    def report(self) -> Report:
        """The schedule of the matrices of all optimizers, for people (rich prints it) and machines (`to_json()`).

        Raises:
            CanzonaError: there was no step yet.
        """
        return make_report(self.reported(), facts_of_all(self.sessions))

    def measure(self, steps: int = 5) -> None:
        """Time the next steps of all optimizers, see `Canzona.measure`."""
        for part in self.parts:
            part.measure(steps)

    def explain(self) -> Explanation:
        """Per parameter of all optimizers: compiled, eager, local or refused, and why."""
        return explain_all(self.sessions)

    def dump(self, directory: str | Path) -> Path:
        """Write what `Canzona.dump` writes, the plan and the report once for all, the rest in a folder per optimizer.

        Args:
            directory: where to make a folder for this rank.

        Returns:
            The rank's folder.
        """
        folder = Path(directory) / f"rank{self.sessions[0].rank}"
        for i, part in enumerate(self.parts):
            part.dump_step(folder / f"{i}_{plain_class(part.session.optimizer).__name__}")
        dump_plan(folder, self.plan(), self.report())
        return folder

    @contextlib.contextmanager
    def ready(self) -> Iterator[None]:
        """Inside this context all optimizers take a step. What one of them refuses, none has begun.

        Each optimizer finds out at its own turn under ZeRO-1, while steps are measured, and if hooks of single
        optimizers change what their steps do.
        """
        first = any(session.driver is None for session in self.sessions) and self.sessions[0].rank == 0
        with contextlib.ExitStack() as stack:
            if first:
                stack.enter_context(shown("canzona, first step", patience=SOON))
            if not any(session.takes_dummy_step() for session in self.sessions):
                for session in self.sessions if self._may_look_ahead() else ():
                    stack.enter_context(session.ready())
            yield
        if self._has_news() and self.sessions[0].rank == 0 and log.isEnabledFor(logging.INFO):
            log.info("%s", headline(self.report()))

    def _may_look_ahead(self) -> bool:
        """Tell whether all optimizers can be ready before the first one steps. Ranks have to plan in one order."""
        planned = all(session.driver is not None for session in self.sessions)
        return not (planned and any(session.measuring.wanted for session in self.sessions))

    def _has_news(self) -> bool:
        """Tell whether an optimizer has something new to report, once."""
        members = [part for part in self.parts if isinstance(part, MemberCanzona)]
        news = any(part.new for part in members)
        for part in members:
            part.new = False
        return news


class Zero1ChainCanzona(ChainCanzona):
    """`chain.canzona` under ZeRO-1: that of the chain, and what is done to all gradients of the model."""

    parts: tuple[Zero1Canzona, ...]

    def _plan_together(self) -> None:
        """`zero1` has planned the whole model already."""

    def reported(self) -> Step:
        """The scheduled step of all optimizers on all ranks, with the buckets."""
        self._busy()
        kinds = [plain_class(session.optimizer).__name__ for session in self.sessions]
        return replace(self.sessions[0].reported(), optimizer="+".join(kinds))  # the plan names those with matrices

    def plan(self) -> PlanFile:
        """Owners, buckets and micro-groups of the whole model, see `Zero1Canzona.plan`."""
        return self.parts[0].plan()

    def _may_look_ahead(self) -> bool:
        return False  # a step of each optimizer has an announcement of its own

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        of: Optimizer | None = None,
    ) -> Tensor:
        """Scale the gradients of the model, or of one optimizer, see `Zero1Canzona.clip_grad_norm_`. A collective."""
        return self.parts[0].clip_grad_norm_(max_norm, norm_type, error_if_nonfinite, of)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Inside this context, backward passes accumulate gradients on each rank without communication."""
        return self.parts[0].no_sync()

    def synchronize(self) -> None:
        """Wait until all parameters are whole on this rank, see `Zero1Canzona.synchronize`."""
        self.parts[0].synchronize()


class CanzonaChain(Chain):
    """The class of a chain whose optimizers are wrapped; see `ChainCanzona.ready` for what it does more."""

    _canzona_plain_class = Chain
    canzona: ChainCanzona

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all optimizers in order, see `Chain.step`."""
        loss = loss_of(closure)
        with self.canzona.ready():
            self.step_all()
        return loss

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the optimizers of a copy or a pickle."""
        super().__setstate__(state)
        for own in self.optimizers:
            own.canzona = MemberCanzona(own.canzona.session)  # type: ignore[attr-defined]
        self.canzona = handle_of(self.optimizers)


# What Optimizer.__init__ does to a class on first use. A train step that is compiled as a whole breaks here.
hooked: Any = outside_dynamo(Optimizer.profile_hook_step(CanzonaChain.step))
hooked.hooked = True
CanzonaChain.step = hooked  # type: ignore[method-assign]


def parts_of(optimizers: Sequence[Optimizer]) -> tuple[Canzona, ...]:
    """What wrapped optimizers have as `.canzona`."""
    return tuple(own.canzona for own in optimizers)  # type: ignore[attr-defined]


def handle_of(optimizers: Sequence[Optimizer], known: Any = None) -> ChainCanzona:
    """Make the handle of several optimizers that are wrapped.

    Args:
        optimizers: those.
        known: the handle that there was; it stays if it is that of these optimizers as they are wrapped now.
    """
    parts = parts_of(optimizers)
    if isinstance(known, ChainCanzona) and [*map(id, known.parts)] == [*map(id, parts)]:
        return known
    return (Zero1ChainCanzona if isinstance(parts[0], Zero1Canzona) else ChainCanzona)(optimizers)


def attach_chain(chain: Chain) -> None:
    """Give a chain whose optimizers are wrapped its class and its handle."""
    chain.__class__ = CanzonaChain
    chain.canzona = handle_of(chain.optimizers, vars(chain).get("canzona"))  # type: ignore[attr-defined]
    rebind_scheduled_step(chain)


def detach_chain(chain: Chain) -> None:
    """Give a chain whose optimizers are no longer wrapped its old class."""
    chain.__class__ = Chain
    del chain.canzona  # type: ignore[attr-defined]
    rebind_scheduled_step(chain)
