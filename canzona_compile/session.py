"""One wrapped optimizer at work: bind, plan, agree, run; re-plan when something changes."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from canzona_compile.binding import Binder, check_gradient, meshes_of, named_params
from canzona_compile.capture.capture import Capture, Kind
from canzona_compile.capture.interpreted import eager_steps
from canzona_compile.capture.oracle import Scalars, Untraceable
from canzona_compile.capture.twin import hypers, make_twin, plain_class, set_leaf, state_leaves, step_plainly
from canzona_compile.errors import CanzonaError, InvalidGradient, UnsupportedOptimizer, some
from canzona_compile.ir import Role, Step
from canzona_compile.options import Options
from canzona_compile.pipeline import History, Observer
from canzona_compile.planner import Plan, emit, lower, make_plan
from canzona_compile.printer import show
from canzona_compile.report import Facts, LocalTask, Report, headline, make_report
from canzona_compile.runtime.executor import Executor
from canzona_compile.runtime.forum import Forum, Waiter
from canzona_compile.runtime.groups import Groups
from canzona_compile.state import StateStore

log = logging.getLogger(__name__)

Names = tuple[str, ...]


class Session:
    """Holds the plan of a wrapped optimizer and executes its steps.

    Until the first step nothing is bound: parameters may still be replaced, and no rank waits.
    """

    def __init__(self, optimizer: Optimizer, options: Options, lost: str = "") -> None:
        self.optimizer, self.options, self.lost = optimizer, options, lost
        self.capture = Capture(optimizer)
        self.groups = Groups()
        self.observers: list[Observer] = []
        self.plan: Plan | None = None
        self.store: StateStore | None = None
        self.number = 0
        self.programs: dict[tuple[bool, Names], tuple[Step, History, Executor]] = {}
        self._forums: dict[tuple[int, ...], Forum] = {}
        self._waiter: Waiter | None = None
        self._agreed: tuple[Names, Names] | None = None
        self._numbers: dict[tuple[str, int], Scalars] = {}
        self._last: tuple[Step, History] | None = None

    # -- a step ------------------------------------------------------------------------------------

    def step(self) -> None:
        """Update all parameters once.

        Raises:
            CanzonaError: before anything was updated, on every rank that shares tasks with this one.
        """
        if self.lost:
            raise CanzonaError(self.lost, hint="call canzona_compile.wrap(optimizer, replicate=...) again")
        self.number += 1
        if self.plan is not None:
            change, error = self._changes()
            if change or error:
                self._call_others(change, error)
            if change.startswith("re-plan"):
                self._close_plan()
        if self.plan is None:
            self._make_plan()
        assert self.plan is not None and self._waiter is not None
        ready, fresh = self._agreed = self._taking_part()
        self._waiter.number = self.number
        if ready:
            self._executor(False, ready).run()
            self._show_counters(ready)
        if fresh:
            self._first_step(fresh)
        self._step_elementwise()
        if fresh or self._last is None:
            self._executor(False, tuple(sorted({*ready, *fresh}, key=self._position)))
            self._announce()

    def _taking_part(self) -> tuple[Names, Names]:
        """Tasks with gradients: those that have state, and those that have none yet."""
        assert self.plan is not None and self.store is not None
        present = [t.name for t in self.plan.owned.tasks if self.store.params[t.name].grad is not None]
        fresh = tuple(n for n in present if n not in self.store.initialised and self._needs_first(n))
        waiting = set(fresh)
        return tuple(n for n in present if n not in waiting), fresh

    def _needs_first(self, name: str) -> bool:
        assert self.plan is not None
        kind = self.plan.bound[name].kind
        return kind.oracle is not None and bool(kind.state or kind.python_state)

    def _changes(self) -> tuple[str, CanzonaError | None]:
        """What is not as agreed, in words that are equal on ranks that see the same; or an error."""
        assert self.plan is not None
        bound = list(self.plan.bound.values())
        params = [p for group in self.optimizer.param_groups for p in group["params"]]
        if len(params) != len(bound) or any(p is not b.param for p, b in zip(params, bound, strict=True)):
            return "re-plan: the parameters changed", None
        try:
            self._check_gradients()
            ready, fresh = self._taking_part()
            self._consult(ready)
        except Untraceable as reason:
            return f"re-plan: {reason}", None
        except CanzonaError as error:
            return "", error
        if self._agreed is None or (ready, fresh) == self._agreed:
            return "", None
        here, before = {*ready, *fresh}, {*self._agreed[0], *self._agreed[1]}
        if here == before:
            return "", None  # tasks that had their first step
        missing = [t.name for t in self.plan.owned.tasks if t.name not in here]
        return f"no gradient for {some(missing, 8) or 'none'} ({len(missing)} missing)", None

    def _check_gradients(self) -> None:
        assert self.plan is not None and self.store is not None
        for name, param in self.store.params.items():
            grad = param.grad
            if grad is None:
                continue
            own = grad._local_tensor if isinstance(grad, DTensor) else grad
            part = param._local_tensor if isinstance(param, DTensor) else param
            expected = self.plan.bound[name].kind.template.leaf("grad").dtype
            if own.shape != part.shape or own.dtype != expected or own.layout is not torch.strided:
                assert expected is not None
                check_gradient(param, name, expected)
                raise InvalidGradient("the gradient does not fit its parameter", at=name)

    def _consult(self, ready: Names) -> None:
        """Ask the oracles for this step's numbers, and whether the code would still take the same path."""
        assert self.plan is not None
        self._numbers = {}
        for name in ready:
            bound = self.plan.bound[name]
            key = (bound.kind.template.name, bound.group)
            if key in self._numbers or bound.kind.oracle is None:
                continue
            self._set_counters(bound.kind, bound.group, ready)
            variant, scalars = bound.kind.oracle.consult(self.optimizer.param_groups[bound.group])
            if variant is not bound.kind.variant:
                raise Untraceable("the hyperparameters lead to other code")
            self._numbers[key] = scalars

    # -- python state (counters) -------------------------------------------------------------------

    def _set_counters(self, kind: Kind, group: int, ready: Names) -> None:
        """Give the twin the Python leaves of the optimizer's own state."""
        if not kind.python_state:
            return
        assert self.plan is not None and kind.oracle is not None
        alike = [b for n in ready if (b := self.plan.bound[n]).kind is kind and b.group == group]
        counters = [python_leaves(self.optimizer.state[b.param]) for b in alike]
        if any(c != counters[0] for c in counters):
            raise UnsupportedOptimizer(
                "parameters alike have different counters in their state",
                at=alike[0].task.name,
                hint="give every parameter of a group a gradient on every step",
            )
        twin = kind.oracle.twin
        for name, value in counters[0].items():
            set_leaf(twin.state[twin.param_groups[0]["params"][0]], name, value)

    def _show_counters(self, ready: Names) -> None:
        """Copy the Python leaves that the step changed on the twin to the optimizer's own state."""
        assert self.plan is not None
        for name in ready:
            bound = self.plan.bound[name]
            if bound.kind.python_state and bound.kind.oracle is not None:
                twin = bound.kind.oracle.twin
                leaves = python_leaves(twin.state[twin.param_groups[0]["params"][0]])
                for leaf, value in leaves.items():
                    set_leaf(self.optimizer.state[bound.param], leaf, value)

    # -- planning ----------------------------------------------------------------------------------

    def _make_plan(self) -> None:
        """Bind, plan and agree. A rank that fails tells the others, so that all raise."""
        params = [p for _, _, p in named_params(self.optimizer)]
        distributed = dist.is_available() and dist.is_initialized()
        device = params[0].device if params else torch.device("cpu")
        if distributed:
            given = [self.options.replicate] if self.options.replicate is not None else []
            self.groups.learn([*meshes_of(params), *given])
        rank = dist.get_rank() if distributed else 0
        error: CanzonaError | None = None
        plan: Plan | None = None
        binder = Binder(self.optimizer, self.options, self.capture)
        try:
            self._check_all_gradients()
            plan = make_plan(binder.bind(), self.name, self.options, self.observers)
        except CanzonaError as found:
            error = found
        members = {tuple(sorted(m.mesh.flatten().tolist())) for m in meshes_of(params)}
        if binder.replicas:
            members.add(binder.replicas)
        for ranks in sorted(m for m in members if len(m) > 1):
            self._forum(ranks, device).agree("", error)
        if error is not None:
            raise error
        assert plan is not None
        self.plan, self.store = plan, StateStore(self.optimizer, plan, self.groups, rank)
        self.store.adopt()
        ready, fresh = self._taking_part()
        grids = {t.layout.grid.members() for t in plan.owned.tasks if t.layout.grid.size > 1}
        taking = {**dict.fromkeys(ready, "a gradient"), **dict.fromkeys(fresh, "a first gradient")}
        present = [f"{t.name} has {taking.get(t.name, 'no gradient')}" for t in plan.owned.tasks]
        text = "\n".join((self.options_text, *present, show(plan.owned)))
        for ranks in sorted(grids):
            own = text if len(grids) == 1 else self._shared_text(plan.owned, ranks)
            self._forum(ranks, device).agree(own, None)
        self._waiter = Waiter(list(self._forums.values()), device)
        self._consult(ready)

    def _shared_text(self, owned: Step, ranks: tuple[int, ...]) -> str:
        """What these ranks must agree on when other ranks hold other parameters: their own tasks."""
        lines = [
            f"{t.name} {list(t.shape)} {t.placed} {t.layout.placements} owner {t.owner}"
            for t in owned.tasks
            if t.layout.grid.members() == ranks
        ]
        return "\n".join((*lines, self.options_text))

    @property
    def options_text(self) -> str:
        o = self.options
        return f"{o.strategy} {o.numerics} capacity {o.capacity} groups {o.groups} depth {o.depth}"

    @property
    def name(self) -> str:
        return plain_class(self.optimizer).__name__

    def _forum(self, ranks: tuple[int, ...], device: torch.device) -> Forum:
        if ranks not in self._forums:
            self._forums[ranks] = Forum(ranks, self.groups.of(ranks), device)
        return self._forums[ranks]

    def _call_others(self, change: str, error: CanzonaError | None) -> None:
        for forum in self._forums.values():
            forum.call(self.number, change, error)
        if error is not None:
            raise error

    def _check_all_gradients(self) -> None:
        """Before the first plan: no sparse or complex gradients."""
        for name, _, param in named_params(self.optimizer):
            if param.grad is not None:
                check_gradient(param, name, param.grad.dtype)

    def _close_plan(self) -> None:
        """Put the state in portable form and forget the plan."""
        if self.store is not None:
            self.store.release()
        self.forget_plan()

    def close(self) -> None:
        if self.plan is not None:
            self._close_plan()

    @contextlib.contextmanager
    def portable_state(self) -> Iterator[None]:
        """While open, `optimizer.state` is what the unwrapped optimizer would hold (a collective)."""
        with contextlib.nullcontext() if self.store is None else self.store.shown_portably():
            yield

    def forget_plan(self) -> None:
        """Bind again at the next step; `optimizer.state` is portable already."""
        self.plan = self.store = self._agreed = None
        self.programs = {}

    # -- execution ---------------------------------------------------------------------------------

    def _executor(self, first: bool, names: Names) -> Executor:
        key = (first, names)
        if key not in self.programs:
            assert self.plan is not None and self.store is not None and self._waiter is not None
            scheduled, history = lower(
                self.plan.first if first else self.plan.owned, names, self.options, self.observers
            )
            emitted, last = emit(scheduled, self.store.rank, self.observers)
            history = History((*history.records, *last.records))
            for template in emitted.templates:
                for eager in eager_steps(template):
                    eager.tasks = self
            device = next((p.device for p in self.store.params.values()), torch.device("cpu"))
            executor = Executor(emitted.program, device, self.groups, self._waiter, self)
            self.programs[key] = (emitted, history, executor)
        emitted, history, executor = self.programs[key]
        if not first:
            self._last = emitted, history
        return executor

    def _position(self, name: str) -> int:
        assert self.plan is not None
        return self.plan.bound[name].task.index

    def _first_step(self, fresh: Names) -> None:
        assert self.store is not None
        self._scratch: dict[str, dict[str, Any]] = {name: {} for name in fresh}
        for name in fresh:
            self.store.allocate(name)
        self._executor(True, fresh).run()
        for name in fresh:
            self.store.install(name)
        del self.programs[True, fresh]  # its buffers are large and it is not needed again
        self._scratch = {}

    def _step_elementwise(self) -> None:
        """Let the optimizer's own step update what needs no communication, fragment by fragment."""
        assert self.plan is not None
        own = [b for b in self.plan.elementwise if b.param.grad is not None]
        if not own:
            return
        twin = make_twin(self.optimizer, {}, [])
        twin.state = self.optimizer.state
        groups = sorted({b.group for b in own})
        twin.param_groups = [
            {**self.optimizer.param_groups[g], "params": [b.param for b in own if b.group == g]} for g in groups
        ]
        step_plainly(twin)
        for g, group in zip(groups, twin.param_groups, strict=True):
            self.optimizer.param_groups[g].update(hypers(group))

    # -- what programs and eager steps ask for ---------------------------------------------------------

    def fragment(self, role: Role, leaf: str, task: str) -> Tensor:
        assert self.store is not None
        return self.store.fragment(role, leaf, task)

    def resident(self, leaf: str, task: str) -> Tensor:
        assert self.store is not None
        return self.store.resident(leaf, task)

    def number_of(self, template: str, group: int, name: str) -> Any:
        return self._numbers[template, group][name]

    def eager_optimizer(self) -> Optimizer:
        return self.optimizer

    def group_of(self, task: str) -> dict[str, Any]:
        assert self.plan is not None
        return self.optimizer.param_groups[self.plan.bound[task].group]

    def state_of(self, task: str) -> dict[str, Any]:
        """Scratch for the first step of a compiled task; the task's own state where every step is eager."""
        assert self.plan is not None
        bound = self.plan.bound[task]
        return self.optimizer.state[bound.param] if bound.kind.oracle is None else self._scratch[task]

    # -- questions -----------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0

    def last(self) -> tuple[Step, History]:
        """The step that the next `step()` will run again, emitted, and the passes that made it."""
        if self._last is None or self.plan is None:
            raise CanzonaError("there is no plan yet", hint="call step() once; plans are made at the first one")
        emitted, history = self._last
        return emitted, History((*self.plan.history.records, *history.records))

    def report(self) -> Report:
        step, _ = self.last()
        assert self.plan is not None
        return make_report(step, self._facts(self.plan))

    def _facts(self, plan: Plan) -> Facts:
        """What the report says beside the step itself."""
        kinds = {b.kind.template.name: b.kind for b in plan.bound.values()}
        local = tuple(
            LocalTask(b.task.name, b.task.shape, "elementwise: each rank updates its fragment")
            for b in plan.elementwise
        )
        reasons = {t.name: plan.bound[t.name].kind.template.interpreted for t in plan.owned.tasks}
        return Facts(
            world_size=dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1,
            captures=self.capture.captures,
            local=local,
            interpreted={name: why for name, why in reasons.items() if why},
            suggestions=suggestions(plan, self.options),
            numerics=self.options.numerics,
            variants=sum(len(k.oracle.variants) for k in kinds.values() if k.oracle is not None),
            rank_programs=len(self.programs),
        )

    def _announce(self) -> None:
        if self.rank == 0:
            log.info("%s", headline(self.report()))


def suggestions(plan: Plan, options: Options) -> tuple[str, ...]:
    """What the user could change to share work that every rank repeats now."""
    if not (dist.is_available() and dist.is_initialized()) or options.replicate is not None:
        return ()
    alone = [t for t in plan.owned.tasks if t.layout.grid.size == 1 and t.layout.placements == "local"]
    if not alone or dist.get_world_size() == 1:
        return ()
    return (
        f"{len(alone)} matrices are plain tensors, computed on their rank alone. If ranks hold equal "
        "copies of them (DDP), wrap(..., replicate=group) shares the work.",
    )


def python_leaves(state: dict[str, Any]) -> dict[str, Any]:
    return {name: v for name, v in state_leaves(state) if not isinstance(v, Tensor)}
