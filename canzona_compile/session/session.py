"""The life of a wrapped optimizer: plan at the first step, agree with the other ranks, re-plan on change."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from canzona_compile.capture.dynamo_oracle import Untraceable
from canzona_compile.capture.templates import Capture
from canzona_compile.capture.twin import plain_class
from canzona_compile.errors import CanzonaError
from canzona_compile.ir.pipeline import History, Observer
from canzona_compile.ir.plan_file import PlanFile
from canzona_compile.ir.step import Step
from canzona_compile.kernels.tensor_args import tuned
from canzona_compile.options import Options
from canzona_compile.report.build import Report, headline, make_report
from canzona_compile.report.explain import Explanation, explain_ahead, explain_plan
from canzona_compile.report.run_facts import facts_of
from canzona_compile.runtime.process_groups import Groups
from canzona_compile.runtime.rank_agreement import Council
from canzona_compile.runtime.store_agreement import Waiter
from canzona_compile.session.bind import Binder, check_gradient, meshes_of, named_params
from canzona_compile.session.checkpoint_probe import is_dummy_step, undone
from canzona_compile.session.plan import Plan, lower, make_plan
from canzona_compile.session.plan_execution import Running, TakingPart

log = logging.getLogger(__name__)

REPLAN = "re-plan: "


class Session:
    """Steps a wrapped optimizer.

    Until the first step nothing is bound: parameters may still be replaced, and no rank waits.
    """

    def __init__(self, optimizer: Optimizer, options: Options, lost: str = "") -> None:
        self.optimizer, self.options, self.lost = optimizer, options, lost
        self.capture = Capture(optimizer)
        self.groups = Groups()
        self.observers: list[Observer] = []
        self.running: Running | None = None
        self.number = 0
        self.rehearsed = False  # is what `optimizer.state` holds of a dummy step?
        self._council: Council | None = None
        self._waiter = Waiter([], torch.device("cpu"))

    @property
    def rank(self) -> int:
        return dist.get_rank() if distributed() else 0

    def step(self) -> None:
        """Update all parameters once.

        Raises:
            CanzonaError: on every rank that shares tasks with this one. Nothing was updated then; only where
                a collective broke, micro-groups before it were.
        """
        if self.lost:
            raise CanzonaError(self.lost, hint="call canzona_compile.wrap(optimizer, replicate=...) again")
        self.number += 1
        if is_dummy_step(self.optimizer):
            self._rehearse()
            return
        with self._gradients():
            try:
                self._step()
            finally:
                if self.running is not None:
                    self.running.give_back_pieces()

    def _rehearse(self) -> None:
        """Leave state for a checkpoint to be loaded into, portable on every rank, and nothing else."""
        with undone(self.optimizer):
            self._step()
            self.close()
        self.rehearsed = True

    @contextlib.contextmanager
    def _gradients(self) -> Iterator[None]:
        """While open, parameters without a gradient have zeros where that was asked for."""
        params = [p for _, _, p in named_params(self.optimizer)] if self.options.missing_grads == "zero" else []
        bare = [p for p in params if p.grad is None]
        for param in bare:
            param.grad = torch.zeros_like(param)
        try:
            yield
        finally:
            for param in bare:
                param.grad = None

    def _step(self) -> None:
        taking = None if self.running is None else self._taking_part(self.running)
        if taking is None:
            self.close()
            self.running = self._start()
            taking = self.running.agreed
        assert self.running is not None
        self._waiter.number = self.number
        try:
            first = self.running.step(taking, self._waiter)
        except CanzonaError:
            raise
        except Exception as error:  # of the optimizer's own code, on an owner: others wait for its results
            if self._council is not None:
                failure = CanzonaError(f"the step failed on rank {self.rank}: {type(error).__name__}: {error}")
                self._council.fail(self.number, failure)
            raise
        if first and self.rank == 0 and self.running.last is not None:
            log.info("%s", headline(self.report()))

    def _taking_part(self, running: Running) -> TakingPart | None:
        """The tasks of this step; None if it needs a new plan. A change that a rank sees all must see."""
        change, error, taking = "", None, running.agreed
        try:
            if not running.bound_to(self.optimizer):
                change = REPLAN + "the parameters changed"
            else:
                running.take_pieces()
                running.check_gradients()
                taking = running.taking_part()
                running.cohorts.consult(taking[0])
                change = running.change(taking)
        except Untraceable as reason:
            change = REPLAN + str(reason)
        except CanzonaError as found:
            error = found
        if (change or error) and self._council is not None:
            self._council.call(self.number, change, error)
        return None if change.startswith(REPLAN) else taking

    def _start(self) -> Running:
        """Bind, plan and agree. A rank that fails tells the others, so that all raise."""
        params = [p for _, _, p in named_params(self.optimizer)]
        device = params[0].device if params else torch.device("cpu")
        meshes = meshes_of(params)
        if distributed():
            self.groups.learn([*meshes, *([self.options.replicate] if self.options.replicate else [])])
        binder = Binder(self.optimizer, self.options, self.capture)
        plan, error = self._plan(binder)
        council = self._council = self._council or Council(self.groups, device)
        members = {tuple(sorted(mesh.mesh.flatten().tolist())) for mesh in meshes} | {binder.replicas}
        council.report(members, error)
        assert plan is not None
        running = Running(self.capture, plan, self.options, self.groups, self.rank, self.observers)
        running.store.adopt()
        running.take_pieces()
        ready, fresh = running.agreed = running.taking_part()
        taking = {**dict.fromkeys(ready, "a gradient"), **dict.fromkeys(fresh, "a first gradient")}
        present = [f"{t.name} has {taking.get(t.name, 'no gradient')}" for t in plan.owned.tasks]
        council.compare(plan.owned, f"{self.options.text}\n{tuned(device)}", present)
        self._waiter = council.waiter()
        try:
            running.cohorts.consult(ready)
        except Untraceable as reason:
            raise CanzonaError(f"the plan does not know the code of its first step: {reason}") from reason
        return running

    def _plan(self, binder: Binder) -> tuple[Plan | None, CanzonaError | None]:
        try:
            for name, _, param in named_params(self.optimizer, self.options.names):
                if param.grad is not None:
                    check_gradient(param, name, param.grad.dtype)
            plan = make_plan(binder.bind(), plain_class(self.optimizer).__name__, self.options, self.observers)
            if self.options.plan is not None:
                self.options.plan.check_followed(whole(plan, self.options))
            return plan, None
        except CanzonaError as error:
            return None, error
        except Exception as error:  # whatever it is, peers must hear of it instead of waiting
            failure = CanzonaError(f"planning failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            return None, failure

    def last(self) -> tuple[Step, History]:
        """The step that the next `step()` will run again, emitted, and the passes that made it."""
        if self.running is None or self.running.last is None:
            raise CanzonaError("there is no plan yet", hint="call step() once; plans are made at the first one")
        return self.running.last

    def plan(self) -> PlanFile:
        """The decisions of the plan at work, for all of its matrices."""
        self.last()
        assert self.running is not None
        return PlanFile.of(whole(self.running.plan, self.options))

    def report(self) -> Report:
        step, _ = self.last()
        assert self.running is not None
        return make_report(step, facts_of(self.running, self.capture.captures))

    def explain(self) -> Explanation:
        if self.running is None:
            return explain_ahead(self.optimizer, self.options, self.capture)
        return explain_plan(self.optimizer, self.running.plan)

    def close(self) -> None:
        """Put the state in portable form (a collective) and forget the plan."""
        if self.running is not None:
            self.running.store.release()
        if self.rehearsed:
            self.optimizer.state.clear()
        self.forget_plan()

    def forget_plan(self) -> None:
        """Bind again at the next step; `optimizer.state` is portable already, and valid."""
        if self.running is not None:
            self.running.forget_programs()
        self.running, self.rehearsed = None, False

    @contextlib.contextmanager
    def portable_state(self) -> Iterator[None]:
        """While open, `optimizer.state` is what the unwrapped optimizer would hold (a collective)."""
        with contextlib.nullcontext() if self.running is None else self.running.store.shown_portably():
            yield


def whole(plan: Plan, options: Options) -> Step:
    """The scheduled step of a plan's matrices, as if all had gradients."""
    return lower(plan.owned, [task.name for task in plan.owned.tasks], options)[0]


def distributed() -> bool:
    return dist.is_available() and dist.is_initialized()
