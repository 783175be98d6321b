"""`optimizer.canzona`: access to the graphs, passes, plan and report of a wrapped optimizer, with ZeRO-1 or without."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, fx, nn
from torch.optim import Optimizer

from canzona_compile.compat.telling import SOON, shown
from canzona_compile.compat.torch_private import calls_outside_dynamo
from canzona_compile.data_parallel.engine import Zero1
from canzona_compile.data_parallel.model_plan import ModelPlan
from canzona_compile.data_parallel.session import OwnerSession
from canzona_compile.errors import CanzonaError
from canzona_compile.ir.fx_utils import graph_module
from canzona_compile.ir.pipeline import PassHistory
from canzona_compile.ir.plan_file import PlanFile
from canzona_compile.ir.printer import show
from canzona_compile.ir.sequence import in_sequence, names_in_sequence
from canzona_compile.ir.step import Step
from canzona_compile.report.build import Report, headline, make_report
from canzona_compile.report.explain import Explanation, explain_all
from canzona_compile.report.pass_table import PassTable
from canzona_compile.report.run_facts import facts_of_all, with_matrices
from canzona_compile.session.planning import plan_together
from canzona_compile.session.session import Session, all_ready

STAGES = ("captured", "placed", "program")

log = logging.getLogger(__name__)


@calls_outside_dynamo
class Canzona:
    """Graphs, passes, plan and report of a wrapped optimizer, or of several as one: those of a chain or of a container.

    Before the first step only `explain` works. A report and a plan are those of the matrices of all optimizers.

    Attributes:
        sessions: take the steps of the optimizers, in their order.
        parts: what each of several optimizers has as `.canzona`; empty for one.
        chain: the wrapped chain that the optimizer is part of, as a weak reference, which is called.
    """

    looks_ahead: ClassVar[bool] = True  # whether several optimizers plan together, and all before the first one steps

    def __init__(self, sessions: Sequence[Session], parts: Sequence[Canzona] = ()) -> None:
        self.sessions, self.parts = sessions, tuple(parts)
        self.chain: Callable[[], Any] = lambda: None
        self._has_news = False  # whether a part had something to tell that this has not told yet
        for session in sessions:
            session.turns = sessions[0].turns
        if parts and self.looks_ahead:
            plan_together(sessions)

    @property
    def session(self) -> Session:
        """What takes the steps, of several optimizers those of the first; users add to its `observers` of passes."""
        return self.sessions[0]

    def together(self, parts: Sequence[Any]) -> Canzona:
        """Make the handle of several optimizers of which this and others are the handles."""
        return Canzona([part.session for part in parts], parts)

    def release(self) -> None:
        """Leave the optimizer as it would be if it had never been wrapped. A collective if owners hold state.

        Raises:
            CanzonaError: a rank that this needs does not call it, too. Nothing was changed then.
        """
        with self.session.turns.take("release() or unwrap"):
            for session in self.sessions:
                session.meet("release() or unwrap")
            for session in self.sessions:
                session.leave()

    def consolidate(self, to: int = 0) -> None:
        """Gather the state to one rank, so that it can save alone. Call this on all ranks; it is a collective.

        Until the next step or the next load, `state_dict()` on that rank needs no other rank and returns what it would
        return on all ranks together. That rank alone keeps memory for it:

            optimizer.canzona.consolidate(to=0)
            if rank == 0:
                torch.save(optimizer.state_dict(), path)

        Args:
            to: the global rank.

        Raises:
            CanzonaError: a rank does not call this, too.
        """
        for session in self.sessions:
            session.consolidate(to)

    def graph(self, stage: str = "program", template: str | None = None) -> nn.Module:
        """A stage's graph as a module with `print_readable()`.

        Args:
            stage: "captured" (one template as if on one device), "placed" (its prepare, compute and
                apply_updates as submodules) or "program" (what this rank executes).
            template: name of the template, as the report shows it; the first one by default. "program" has none.

        Returns:
            The graph as a module.

        Raises:
            CanzonaError: there was no step yet, or there is no such stage or template.
        """
        if stage not in STAGES:
            raise CanzonaError(f"no stage {stage!r}", hint=f"one of {', '.join(STAGES)}")
        step, wanted = self.step, template
        if template is not None:
            steps = [session.last()[0] for session in self.sessions]
            number, wanted = names_in_sequence(steps).get(template, (0, template))
            step = steps[number]
        if stage == "program":
            module: fx.GraphModule = step.program.module
            return module
        names = [p.template.name for p in step.placed]
        wanted = wanted or (names[0] if names else "")
        found = next((p for p in step.placed if wanted in (p.name, p.template.name)), None)
        if found is None:
            raise CanzonaError(f"no template {wanted!r}", hint=f"there are {', '.join(names) or 'none'}")
        if stage == "captured":
            return graph_module(found.template.graph, found.template.name)
        parts = {"prepare": found.prepare, "compute": found.compute, "apply_updates": found.apply}
        return PlacedModule(parts, found.name)

    @property
    def step(self) -> Step:
        """The step of the last program, fully lowered; its earlier forms are in `passes()`.

        Of a chain, both are those of the first optimizer with matrices; its `parts` have the others.

        Raises:
            CanzonaError: there was no step yet.
        """
        return with_matrices(self.sessions).last()[0]

    def passes(self) -> PassHistory:
        """What each pass took and changed.

        Raises:
            CanzonaError: there was no step yet.
        """
        return PassTable(with_matrices(self.sessions).last()[1].records)

    def reported(self) -> Step:
        """The scheduled step that the report shows: what the next `step()` runs, one optimizer after the other.

        Raises:
            CanzonaError: there was no step yet.
        """
        steps = [session.last()[0] for session in self.sessions]
        return in_sequence(steps) if self.parts else steps[0]

    def plan(self) -> PlanFile:
        """Owners and micro-groups, to be saved (`to_json`) and followed by another run: wrap(..., plan=).

        Raises:
            CanzonaError: there was no step yet.
        """
        siblings, options = self.session.siblings, self.session.options
        return PlanFile.of(siblings.scheduled(options)) if len(self.sessions) > 1 else self.session.plan()

    def report(self) -> Report:
        """The schedule, for people (rich prints it) and machines (`to_json()`).

        Raises:
            CanzonaError: there was no step yet.
        """
        with self.session.turns.lock:
            return make_report(self.reported(), facts_of_all(self.sessions))

    def measure(self, steps: int = 5) -> None:
        """Time the phases of the next steps; after the last of them `report()` shows the figures. Call it on all ranks.

        The first step, which makes the plan, does not count, and an error ends it. While it measures, ranks that do not
        measure the same steps raise `RankMismatch`. A program for CUDA runs call by call meanwhile and is not replayed.

        Args:
            steps: how many to measure.

        Raises:
            CanzonaError: `steps` is not positive.
        """
        with self.session.turns.take("measure()"):
            for session in self.sessions:
                session.measuring.begin(steps, session.device)

    def explain(self) -> Explanation:
        """Per parameter: compiled, eager, local or refused, and why; see `canzona_compile.explain`."""
        with self.session.turns.lock:
            return explain_all(self.sessions)

    def shown(self) -> contextlib.AbstractContextManager[Any]:
        """Make the context of a step: rank 0 shows on a terminal what the first one does, if that takes a second.

        A chain shows what those of its optimizers do.
        """
        first = any(session.driver is None for session in self.sessions) and self.session.rank == 0
        tells = first and self.chain() is None
        return shown("canzona, first step", patience=SOON) if tells else contextlib.nullcontext()

    def log_headline(self) -> None:
        """Log one line about the plan at work, on rank 0 alone; a chain does it for its optimizers."""
        if (chain := self.chain()) is not None:
            chain.canzona._has_news = True
        elif self.session.rank == 0 and log.isEnabledFor(logging.INFO):  # a report of a thousand ranks takes seconds
            log.info("%s", headline(self.report()))

    @contextlib.contextmanager
    def ready(self) -> Iterator[None]:
        """Inside this context all optimizers take a step. What one of them refuses, none has begun.

        Each optimizer finds out at its own turn under ZeRO-1, and if its hooks change what its step does.
        """
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.session.turns.take())
            stack.enter_context(self.shown())
            if self.looks_ahead and not any(session.takes_dummy_step() for session in self.sessions):
                stack.enter_context(all_ready(self.sessions))
            yield
        if self._has_news:
            self._has_news = False
            self.log_headline()

    def dump(self, directory: str | Path) -> Path:
        """Write every form of the step, the generated code, the plan and the report to files.

        Args:
            directory: where to make a folder for this rank.

        Returns:
            The rank's folder.

        Raises:
            CanzonaError: there was no step yet.
        """
        folder, report = Path(directory) / f"rank{self.session.rank}", self.report()
        self.dump_step(folder)
        (folder / "plan.json").write_text(self.plan().to_json())
        (folder / "report.json").write_text(report.to_json())
        (folder / "report.txt").write_text(report.to_text())
        return folder

    def dump_step(self, folder: Path) -> None:
        """Write every form of the step and the generated code to files in a folder, or in one per optimizer."""
        for i, part in enumerate(self.parts):
            part.dump_step(folder / f"{i}_{part.session.optimizer_name}")
        if self.parts:
            return
        folder.mkdir(parents=True, exist_ok=True)
        for i, record in enumerate(self.passes().records):
            if i == 0:
                (folder / "000_captured.ir").write_text(show(record.before))
            (folder / f"{i + 1:03d}_{record.name}.ir").write_text(show(record.after))
        program = self.step.program
        parts = {"program": program.module, **dict(program.module.named_children())}
        for name, module in parts.items():
            (folder / f"{name}.py").write_text(module.print_readable(print_output=False))


class PlacedModule(nn.Module):
    """The three graphs of a placed template as submodules."""

    def __init__(self, graphs: dict[str, fx.Graph], name: str) -> None:
        super().__init__()
        for part, graph in graphs.items():
            self.add_module(part, graph_module(graph, f"{name}_{part}"))

    def print_readable(self, print_output: bool = True, **options: Any) -> str:
        """The code of all three, as `torch.fx.GraphModule.print_readable`."""
        text = "\n".join(
            module.print_readable(print_output=False, **options)
            for module in self.children()
            if isinstance(module, fx.GraphModule)
        )
        if print_output:
            print(text)
        return text


@calls_outside_dynamo
class Zero1Canzona(Canzona):
    """`optimizer.canzona` of an optimizer under ZeRO-1: what `wrap` gives, and what is done to all gradients.

    Attributes:
        zero1: the buckets of the model and their collectives; all optimizers of one call share it.
        model_plan: the plan of the model, which they share too.
    """

    looks_ahead = False  # `zero1` has planned the whole model, and each optimizer announces its own step
    sessions: Sequence[OwnerSession]

    def __init__(
        self, sessions: Sequence[OwnerSession], zero1: Zero1, model_plan: ModelPlan, parts: Sequence[Canzona] = ()
    ) -> None:
        super().__init__(sessions, parts)
        self.zero1, self.model_plan = zero1, model_plan

    def together(self, parts: Sequence[Any]) -> Canzona:
        return Zero1Canzona([part.session for part in parts], self.zero1, self.model_plan, parts)

    def release(self) -> None:
        """Leave the optimizer as it would be without `zero1`, and the model too after the last one. A collective."""
        self.zero1.synchronize()  # as long as nothing is given up
        super().release()
        for session in self.sessions:
            self.zero1.release(session.member)

    def reported(self) -> Step:
        """The scheduled step of all optimizers on all ranks, with the buckets."""
        for session in self.sessions:
            session.last()
        found = self.model_plan.scheduled(self.session.options)
        kinds = [session.optimizer_name for session in self.sessions]  # the plan names those with matrices
        return replace(found, optimizer="+".join(kinds)) if self.parts else found

    def plan(self) -> PlanFile:
        """Owners, buckets and micro-groups of the whole model: all matrices, of all optimizers of the call of `zero1`.

        `canzona_compile.plan(model, mesh={"dp": ...}, optimizer=..., updates="zero1")` has the same fingerprint.
        """
        return PlanFile.of(self.model_plan.scheduled(self.session.options))

    def measure(self, steps: int = 5) -> None:
        """Time the next steps of the optimizer, and the reductions and gathers of the whole model around them.

        The arguments and errors are those of `Canzona.measure`.
        """
        super().measure(steps)
        self.zero1.measure(self.sessions[-1].measuring.clock)

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        of: Optimizer | None = None,
    ) -> Tensor:
        """Scale the gradients of the whole model so that their norm is at most `max_norm`. This is a collective.

        The gradients are those of all optimizers of the call of `zero1`. The result is that of
        `torch.nn.utils.clip_grad_norm_` on whole gradients, up to the order of one sum.

        Args:
            max_norm: the largest norm.
            norm_type: the order of the norm; `math.inf` for the largest absolute value.
            error_if_nonfinite: whether to raise if the norm is not finite.
            of: one of these optimizers, to clip the gradients of its parameters by their own norm; None for all.

        Returns:
            The norm before, a 0-d tensor of the dtype of gradients, equal on all ranks.

        Raises:
            RuntimeError: the norm is not finite, and `error_if_nonfinite`.
            CanzonaError: gradients are not reduced yet, or `of` is none of the optimizers.
        """
        return self.zero1.clip_grad_norm_(max_norm, norm_type, error_if_nonfinite, of)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Inside this context, backward passes accumulate gradients on each rank without communication.

        Run the last backward pass of a step outside of it.
        """
        return self.zero1.no_sync()

    def synchronize(self) -> None:
        """Wait until all parameters are whole on this rank.

        With `gather="forward"`, call this on every rank before anything but the model's forward pass reads parameters.
        """
        self.zero1.synchronize()
