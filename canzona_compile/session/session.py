"""The life of a wrapped optimizer: plan at the first step, agree with the other ranks, re-plan on change."""

from __future__ import annotations

import contextlib
import contextvars
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from canzona_compile.capture.templates import Capture
from canzona_compile.compat.garbage import seldom_collected
from canzona_compile.compat.torch_private import HOOKS_OF_ALL
from canzona_compile.errors import CanzonaError, problem_of
from canzona_compile.ir.layout import Ranks
from canzona_compile.ir.options import Options
from canzona_compile.replica.raised import failed_on, first_line, note_rank
from canzona_compile.runtime.equal_copies import Copy
from canzona_compile.runtime.launch_order import keep_launch_order
from canzona_compile.runtime.process_groups import Groups, current_device, distributed, widen
from canzona_compile.runtime.step_clock import during
from canzona_compile.runtime.streams import check_not_capturing
from canzona_compile.session import rates
from canzona_compile.session.agreements import Agreements
from canzona_compile.session.bind import meshes_of, replica_ranks
from canzona_compile.session.checkpoints import is_dummy_step, undone
from canzona_compile.session.measuring import Measuring
from canzona_compile.session.params import check_differentiable
from canzona_compile.session.plan import BoundParam, Plan, proposed_capacity
from canzona_compile.session.planning import BoundBySession, PlannedSession
from canzona_compile.session.portable_state import given_back_on_error
from canzona_compile.session.step_driver import ChangeKind, StepChange, StepDriver
from canzona_compile.tensors import finite
from canzona_compile.views.given_layout import shardings_of

SKIPPED = "skipped_steps"  # where the first parameter group counts them


class Found(NamedTuple):
    """What a session found before a step: what changed since the last one, and what keeps this rank from taking it."""

    change: StepChange | None = None
    error: CanzonaError | None = None

    @property
    def replans(self) -> bool:
        """Whether the step needs a new plan."""
        return self.change is not None and self.change.kind is ChangeKind.REPLAN


class Session(PlannedSession):
    """Steps a wrapped optimizer.

    Nothing is bound before the first step, so until then parameters may be replaced and no rank waits for another.

    Attributes:
        has_dummy_state: whether `optimizer.state` holds the state of a dummy step.
    """

    lost_in_copies: ClassVar[str] = ""  # why a copy of the optimizer cannot step; empty if it can
    holds: ClassVar[str] = "its fragment"  # the part of a parameter that a rank has, for reports
    may_move_owners: ClassVar[bool] = True  # whether its options decide which rank owns which matrix

    def __init__(self, optimizer: Optimizer, options: Options, lost: str = "", capture: Capture | None = None) -> None:
        super().__init__(optimizer, options, capture)
        self.lost = lost
        self.groups = Groups()
        self.measuring = Measuring()
        self.has_dummy_state = False
        self._ready: StepDriver | None = None  # takes the next step, which all ranks have agreed on
        self._plans_anew = False  # whether ranks did not agree on the last step, so that all of them plan again
        self.skips = False  # whether some rank's gradients of the step that is ready are not finite
        if "param_groups" in vars(optimizer):  # a copy gets them later
            self._count_skipped()

    def step(self) -> bool:
        """Update all parameters once, and measure that if it is wanted.

        Returns:
            Whether there is something new to report: the plan, or some of the parameters, took the first step, or
            figures were measured.
        """
        with self.turns.take():
            return self.measuring.step(self, self.take_step) if self.measuring.wanted else self.take_step()

    def take_step(self) -> bool:
        """Do what `step` does, and measure nothing else."""
        if self._ready is None and self.takes_dummy_step():
            self._dummy_step()
            return False
        with self.ready() as driver, self.telling():
            if self.skips:
                self._count_skipped(1)
                return False
            return driver.step() and driver.last is not None

    def _count_skipped(self, more: int = 0) -> None:
        """Count skipped steps, also after a checkpoint that has no count."""
        if self.options.skip_nonfinite:
            first = self.optimizer.param_groups[0]
            first[SKIPPED] = first.get(SKIPPED, 0) + more

    def takes_dummy_step(self) -> bool:
        """Tell whether torch.distributed.checkpoint takes the next step, see `is_dummy_step`."""
        return is_dummy_step(self.optimizer)

    def _begin(self) -> None:
        """Begin a step of any kind."""
        if self.lost:
            raise CanzonaError(
                self.lost,
                hint="call canzona_compile.wrap(optimizer, replicate=..., layout=...) or zero1 again",
            )
        self.number += 1
        self._consolidated, self.skips = None, False
        self._count_skipped()

    @contextlib.contextmanager
    def ready(self) -> Iterator[StepDriver]:
        """Inside this context, the next step is planned, and all ranks have agreed on it.

        `take_step` enters it. What steps several sessions enters `all_ready`.
        """
        if self._ready is not None:
            yield contextvars.copy_context().run(self._looked_again, self._ready)
            return
        with self.entered():
            self._ready = self.prepared()
            yield self._ready

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """The context of a step, which may end before the step is taken."""
        self._begin()
        with self.gradients(), current_device(self.device):
            try:
                yield
            except BaseException as error:
                if self.measuring.wanted:
                    self.measuring.end()
                if distributed() and isinstance(error, Exception):
                    note_rank(self.rank, error)
                raise
            finally:
                self._ready = None
                if self.driver is not None:
                    self.driver.end_step()

    def _dummy_step(self) -> None:
        """Take a dummy step that leaves only portable state, into which a checkpoint can be loaded."""
        self._begin()
        self._in_dummy_step = True
        try:
            with undone(self.optimizer):
                driver = self.prepared()
                with self.telling():
                    driver.step()
                self.leave()
        finally:
            self._in_dummy_step = False
        self.has_dummy_state = True

    @contextlib.contextmanager
    def gradients(self) -> Iterator[None]:
        """Inside this context, give parameters without a gradient zeros if `missing_grads` is "zero"."""
        groups = self.optimizer.param_groups if self.options.missing_grads == "zero" else []
        bare = [param for group in groups for param in group["params"] if param.grad is None]
        for param in bare:
            param.grad = torch.zeros_like(param)
        try:
            yield
        finally:
            for param in bare:
                param.grad = None

    def prepared(self) -> StepDriver:
        """Plan if that is needed, and agree with the other ranks on the step, which changes parameters then.

        What code of the optimizer does to variables of the user's context meanwhile is not done to the user's.
        """
        contextvars.copy_context().run(prepare, [self])
        assert self.driver is not None
        if not self._in_dummy_step:
            check_heard([self])
        return self.driver

    def _looked_again(self, driver: StepDriver) -> StepDriver:
        """Agree once more if hooks of this optimizer, which have run since, changed what its step does.

        Some ranks alone may have hooks, such as for logging; those that change nothing need no other rank.
        """
        if not (HOOKS_OF_ALL or self.optimizer._optimizer_step_pre_hooks):
            return driver
        before = driver.facing()
        found = self.look()
        if found.error is not None or found.replans or driver.facing() != before:
            prepare([self], [found])
            assert self.driver is not None
            self._ready = driver = self.driver
        return driver

    def replan(self) -> None:
        """Make a new plan, which the other ranks that share tasks with this one make, too."""
        with during(self.measuring.clock, "plan"), seldom_collected():
            self.release()
            self.driver = self._start()
        self.driver.clock = self.measuring.clock
        self.shared = tuple(self.driver.numbers())
        self._plans_anew = False

    def refused(self) -> None:
        """Ranks that share tasks did not agree on a step: all of them plan again."""
        self._plans_anew = True
        self.capture.forget_kinds()  # captures for a step that other ranks did not take have different names

    def look(self) -> Found:
        """Find out what the step has to do, or why it cannot begin."""
        if self._agreements is not None:
            self._agreements.check()
        try:
            check_differentiable(self.optimizer)
            check_not_capturing(self.device)
            with during(self.measuring.clock, "look"):
                if self._plans_anew:
                    return Found(StepChange.replan("ranks did not agree on the last step"))
                if self.driver is None:
                    return Found(StepChange.replan("there is no plan, as before the first step or after a load"))
                return Found(self.driver.look())
        except CanzonaError as error:
            return Found(None, error)
        except Exception as error:  # the other ranks must learn of any error instead of waiting
            told = CanzonaError(f"the step cannot begin: {first_line(error)}")
            told.__cause__ = error
            return Found(None, told)

    def heard_by(self) -> Iterable[Ranks]:
        """The sets of ranks that this rank tells whether its gradients are finite."""
        return self.shared or ()

    def nonfinite(self) -> bool:
        """Whether steps are skipped for it, and a gradient of this rank has a NaN or an infinity."""
        if self.driver is None or not self.options.skip_nonfinite:
            return False
        return not finite(self.driver.gradients.found.values())

    def numbers(self) -> dict[Ranks, str]:
        """The numbers that the next step reads, by set of ranks; empty texts if there has to be a plan first."""
        if self.driver is None or self._plans_anew:
            return dict.fromkeys(self.shared or (), "")
        return self.measuring.marked(self.driver.numbers())

    def keep_launch_order(self) -> None:
        """Ask NCCL for what it may need, while that is early enough: before the first forward pass, if possible."""
        params, replicate = [p for _, _, p in self.named], self.options.replicate
        candidates = [*meshes_of(params), *([replicate] if replicate else [])]
        if candidates and distributed() and self.device.type == "cuda":
            self.groups.learn(candidates)
            keep_launch_order(self.groups.known, self.device, certain=False)

    def _start(self) -> StepDriver:
        """Bind, plan and agree with the other ranks. A rank that fails tells the others, so that all of them raise."""
        named = self.named
        params, device = [p for _, _, p in named], self.device
        meshes = [*meshes_of(params), *shardings_of(named, self.options.layout).own_meshes]
        replicate = self.options.replicate
        if distributed():
            self.groups.learn([*meshes, *([replicate] if replicate else [])])
        bound: list[BoundBySession] = []
        error = problem_of(lambda: bound.append(self.bind_all()))
        agreements = self._agreements = self._agreements or Agreements(self.groups, device, self.optimizer)
        members = {tuple(sorted(mesh.mesh.flatten().tolist())) for mesh in meshes} | {replica_ranks(replicate)}
        if self.shared is not None:  # only ranks that share tasks have announced that they plan again
            members = {ranks for session in self.siblings.sessions for ranks in session.shared or ()}
        text = self.siblings.text
        text += f" state={self.options.state}" if self.options.state else ""
        text += self.options.rates_text
        agreements.report(members, error, text)
        (every,) = bound
        if not self._in_dummy_step:
            self._get_to_know([b for own in every.values() for b in own], members)
        found: list[Plan] = []
        error = problem_of(lambda: found.append(self.plan_bound(every)))
        agreements.report(members, error)
        (plan,) = found
        if self.shared is not None:
            grids = {task.layout.grid.members() for task in plan.owned.tasks if task.layout.grid.size > 1}
            agreements.meet(grids - members)
        driver = StepDriver(self.capture, plan, self.options, self.groups, self.rank, self.observers, agreements.waiter)
        with given_back_on_error(self.optimizer, partial(self._give_up, driver)):
            with self.telling(driver):
                has = driver.begin()
            agreements.report(members, problem_of(driver.check))
            free = free_memory(self.device) if plan.owned.machine.device == "cuda" else None
            proposed = proposed_capacity([self.options, *(s.options for s in self.siblings.sessions)], free)
            agreed = agreements.compare(plan.owned, self.options.text, has, proposed)
            self.options = driver.maker.options = replace(self.options, agreed=agreed or self.options.agreed)
            if not self._in_dummy_step:  # a checkpoint may be loaded after it and make the copies equal
                copied = [t for t in plan.owned.tasks if t.layout.grid.replicas > 1]
                agreements.compare_copies([Copy(t.name, t.layout.grid, driver.store.params[t.name]) for t in copied])
            agreements.report(members, problem_of(driver.choose_variants))
        return driver

    def _get_to_know(self, bound: Sequence[BoundParam], members: set[Ranks]) -> None:
        """Measure what the plans of this chain depend on, over process groups that are as fast as they can be.

        This is a collective of the ranks that share matrices.

        Args:
            members: the sets of ranks that plan; of a plan in mid-run, no other one has announced that it does.
        """
        assert self._agreements is not None
        sets = rates.shared_by(bound)
        if self.shared is not None:
            sets &= members
        if not sets:
            return
        agreements, groups, watch = self._agreements, self.groups, self._agreements.waiter
        known = {ranks: (agreements.of(ranks), groups.of(ranks)) for ranks in sorted(sets)}
        try:
            for ranks in known:
                shared = [b for b in bound if b.task.layout.grid.members() == ranks]
                moved = sum(math.prod(b.task.layout.shape) * b.param.element_size() for b in shared)
                most = max(map(int, agreements.of(ranks).share(str(moved))))  # ranks may differ, which they learn later
                widen(groups.of(ranks), self.device, most)
                groups.warm_up(ranks, self.device, watch)
            if not self.options.measures:
                return
            found = rates.measured_rates(known, rates.Wanted.by(bound), self.device, watch)
        except BaseException as error:  # the others wait for this rank
            agreements.fail(failed_on(self.rank, error))
            raise
        for session in self.siblings.sessions:
            session.options = replace(session.options, measured=found)

    def _give_up(self, driver: StepDriver, error: BaseException) -> None:
        """Leave a plan that has not taken a step."""
        driver.end_step()
        if not isinstance(error, CanzonaError):  # the other ranks may wait for a collective that no rank joins any more
            with contextlib.suppress(BaseException), self.telling(driver):
                raise error

    def leave(self) -> None:
        """Put what the unwrapped optimizer would hold into its state, and drop the plan, once all ranks have met."""
        self.release()

    def release(self) -> None:
        """Put the state into portable form and drop the plan. This is a collective if owners hold state."""
        if self.driver is not None:
            with current_device(self.device):
                self.driver.release()
        if self.has_dummy_state:
            self.optimizer.state.clear()
        self.forget_plan()

    def forget_plan(self) -> None:
        """Drop the plan, so that the next step binds and plans again. `optimizer.state` must be portable already."""
        if self.driver is not None:
            self.driver.forget_programs()
            self.capture.watch.hold({})
        self.driver, self.has_dummy_state, self._consolidated = None, False, None
        self.measuring.found = None


def free_memory(device: torch.device) -> int:
    """The bytes of a GPU that buffers may take: what forward and backward needed at most so far is not among them."""
    unused = torch.cuda.memory_reserved(device) - torch.cuda.max_memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


@contextlib.contextmanager
def all_ready(sessions: Sequence[Session]) -> Iterator[None]:
    """Inside this context, the next steps of several sessions are planned, and all ranks have agreed on all of them."""
    with contextlib.ExitStack() as stack:
        for session in sessions:
            stack.enter_context(session.entered())
        contextvars.copy_context().run(prepare, sessions)
        check_heard(sessions)
        for session in sessions:
            session._ready = session.driver
        yield


def prepare(sessions: Sequence[Session], found: Sequence[Found] = ()) -> None:
    """Plan where that is needed, and agree with other ranks on the steps of sessions. They look unless it is known."""
    found = found or [session.look() for session in sessions]
    try:
        settle(sessions, found)
    except CanzonaError:
        for session in sessions if any(own.shared for own in sessions) else ():
            session.refused()
        raise
    anew = [session for session, own in zip(sessions, found, strict=True) if own.replans]
    for session in anew:
        session.replan()
    if anew:
        settle(sessions, [Found()])


def settle(sessions: Sequence[Session], found: Sequence[Found]) -> None:
    """Raise unless every rank found what this rank found, reads the same numbers, and can take the steps.

    What any session found is announced to every set of ranks that shares tasks of one of them: the others may share
    none, and ranks that step without this one would wait for it in the middle of the step. Names are for the ranks that
    share the tasks, because others may have tasks of other names. New code is announced to these alone.
    """
    changes = [own.change for own in found if own.change is not None]
    error = next((own.error for own in found if own.error is not None), None)
    skips = error is None and not any(own.replans for own in found) and any(s.nonfinite() for s in sessions)
    numbers: dict[Ranks, list[str]] = {}
    holders: dict[Ranks, Session] = {}
    elsewhere = False
    for session in sessions:
        for ranks, text in session.numbers().items():
            numbers.setdefault(ranks, []).append(text)
            holders.setdefault(ranks, session)
    with contextlib.ExitStack() as stack:
        for session in sessions:
            stack.enter_context(session.telling())
        for ranks in sorted(numbers):
            own = holders[ranks]
            assert own._agreements is not None
            others = "".join(f" with {other.optimizer_name}" for other in sessions if other is not own)
            seen = [own for own in changes if own.seen_by(ranks)]
            change, said = ("; ".join(texts) for texts in ([c.seen_by(ranks) for c in seen], [c.text for c in seen]))
            details = {"change": change, "said": said, "numbers": "\n".join(numbers[ranks])}
            details["nonfinite"] = "yes" if skips else ""
            with during(own.measuring.clock, "agree"):
                verdict, told = own._agreements.settle(ranks, f"step(){others}", details, error)
            error = error or verdict
            elsewhere |= any(other["nonfinite"] for other in told)
    if error is not None:
        raise error
    for session in sessions:
        session.skips |= skips or elsewhere


def check_heard(sessions: Sequence[Session]) -> None:
    """Raise if steps are skipped, but no set of ranks that these sessions tell is the whole job. All ranks raise."""
    if not sessions[0].options.skip_nonfinite:
        return
    everybody = dist.get_world_size() if distributed() else 1
    told = max([1, *(len(ranks) for session in sessions for ranks in session.heard_by())])
    if told < everybody:
        raise CanzonaError(
            f"no set of ranks that share matrices is the whole job of {everybody} ranks, so a rank that skips a step "
            "could not tell the others",
            at="the option skip_nonfinite",
            hint="step a chain as a whole. Otherwise all-reduce a flag over all ranks after backward(), and leave out "
            "step() where it is set",
        )
