"""A plan at work: which tasks take part in a step, their programs, and their execution."""

from __future__ import annotations

import contextlib
import warnings
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from canzona_compile.capture.dynamo_oracle import Untraceable
from canzona_compile.capture.eager_fallback import eager_steps
from canzona_compile.capture.external_counters import Shadow
from canzona_compile.capture.templates import Capture
from canzona_compile.capture.twin import plain_class
from canzona_compile.errors import InvalidGradient, UnsupportedOptimizer
from canzona_compile.ir.pipeline import History, Observer
from canzona_compile.ir.program_ops import Watch
from canzona_compile.ir.step import Role, Step
from canzona_compile.options import Options
from canzona_compile.runtime.buffers import SharedSlots
from canzona_compile.runtime.executor import Executor
from canzona_compile.runtime.process_groups import Groups
from canzona_compile.session.bind import check_gradient
from canzona_compile.session.local_step import Elementwise
from canzona_compile.session.plan import Plan, emit, lower
from canzona_compile.session.state import StateStore
from canzona_compile.session.variant_selection import Cohorts

Names = tuple[str, ...]
TakingPart = tuple[Names, Names]  # tasks that have state, and tasks before their first step
Lineup = tuple[tuple[str, int, Names], ...]  # template, label of its numbers, tasks
Key = tuple[Names, Lineup]
Made = tuple[Executor, Step, History]

MOST_PROGRAMS = 32  # the least recently used one is made anew when it is needed again


class Running:
    """Executes the steps of one plan.

    Programs are made for the tasks that take part and kept. `agreed` are the tasks of the last step:
    those that had state, and those that did not.
    """

    def __init__(
        self, capture: Capture, plan: Plan, options: Options, groups: Groups, rank: int, observers: list[Observer]
    ) -> None:
        self.capture, self.plan, self.options = capture, plan, options
        self.optimizer = optimizer = capture.optimizer
        self.groups, self.rank, self.observers = groups, rank, observers
        self.store = StateStore(optimizer, plan, groups, rank)
        self.cohorts = Cohorts(capture, plan, plan.stagger.ahead if options.stagger else {})
        self.elementwise = Elementwise(optimizer, plan.elementwise)
        self.shadow = Shadow(optimizer)
        self.programs: OrderedDict[Key, Made] = OrderedDict()
        self.memory = SharedSlots()
        self.agreed: TakingPart = ((), ())
        self.last: tuple[Step, History] | None = None
        self.executor: Executor | None = None  # that of the last program
        self._shared = {t.name for t in plan.owned.tasks if t.layout.grid.size > 1}
        self._fused = {b.fused: b.kind.grad_dtype for b in plan.bound.values() if b.fused is not None}
        self._met: set[Lineup] = set()
        self._scratch: dict[str, dict[str, Any]] = {}
        self._warned = False

    def bound_to(self, optimizer: Optimizer) -> bool:
        """Are the optimizer's parameters still the ones of this plan?"""
        params = [id(p) for group in optimizer.param_groups for p in group["params"]]
        bound = (b.param if b.fused is None else b.fused.whole for b in self.plan.bound.values())
        return params == list(dict.fromkeys(map(id, bound)))

    def take_pieces(self) -> None:
        """Give the pieces of fused parameters what those hold; raises InvalidGradient."""
        for fused, expected in self._fused.items():
            if fused.whole.grad is not None:
                check_gradient(fused.whole, fused.name, expected)
            fused.take()

    def give_back_pieces(self) -> None:
        for fused in self._fused:
            fused.give_back()

    def taking_part(self) -> TakingPart:
        """Tasks with gradients: those that have state, and those that have none yet."""
        present = [name for name, param in self.store.params.items() if param.grad is not None]
        fresh = tuple(n for n in present if n not in self.store.initialised and self._has_first_step(n))
        waiting = set(fresh)
        return tuple(n for n in present if n not in waiting), fresh

    def _has_first_step(self, name: str) -> bool:
        kind = self.plan.bound[name].kind
        return kind.oracle is not None and bool(kind.state or kind.python_state)

    def check_gradients(self) -> None:
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

    def change(self, taking: TakingPart) -> str:
        """What other ranks must see as well before this step, in words that are equal on those that do."""
        here, before = {*taking[0], *taking[1]}, {*self.agreed[0], *self.agreed[1]}
        if (here ^ before) & self._shared:
            missing = [t.name for t in self.plan.owned.tasks if t.name in self._shared and t.name not in here]
            return f"no gradient for {', '.join(missing) or 'none'}"
        lineup = self._shared_lineup()
        if lineup in self._met:
            return ""
        return "new code for " + ", ".join(f"{names[0]} and {len(names) - 1} more" for _, _, names in lineup)

    def _shared_lineup(self) -> Lineup:
        """The part of the lineup that ranks have in common."""
        shared = (
            (template, label, tuple(n for n in names if n in self._shared))
            for template, label, names in self.cohorts.lineup
        )
        return tuple(part for part in shared if part[2])

    def forget_programs(self) -> None:
        """Give up their buffers, and recordings, now: programs and this object refer to each other."""
        self.programs.clear()
        self.memory = SharedSlots()
        self.executor = self.last = None

    @property
    def buffer_bytes(self) -> int:
        """Of all programs that are kept, what they share counted once."""
        slots = {id(slot): slot.numel() for executor, _, _ in self.programs.values() for slot in executor.slots}
        return sum(slots.values())

    # -- execution ---------------------------------------------------------------------------------

    def step(self, taking: TakingPart, watch: Watch) -> bool:
        """Update all parameters once; tells whether this was the first step of some."""
        ready, fresh = self.agreed = taking
        if ready:
            self._met.add(self._shared_lineup())
            self._program(ready, watch).run()
            self.cohorts.show_counters()
            self.store.interpreted(ready)
        if fresh:
            self._first_step(fresh, watch)
        self.elementwise.step()
        if self.capture.counts:
            self.shadow.count()
        if not fresh and self.last is not None:
            return False
        order = {t.name: i for i, t in enumerate(self.plan.owned.tasks)}
        with contextlib.suppress(Untraceable):  # then the next step will plan anew
            self._foresee(tuple(sorted({*ready, *fresh}, key=order.__getitem__)), watch)
        return True

    def _foresee(self, names: Names, watch: Watch) -> None:
        """Make the next step's program now: it is what the report shows."""
        self.cohorts.consult(names)
        self._met.add(self._shared_lineup())
        self._program(names, watch)

    def _program(self, names: Names, watch: Watch) -> Executor:
        """The program in which these tasks do what their code says; made now if it is new."""
        key = names, self.cohorts.lineup
        if key not in self.programs:
            owned = self.plan.taking(self.cohorts.lineup)
            executor, emitted, history = self._make(owned, names, watch, self.memory)
            self.programs[key] = executor, emitted, History((*self.plan.history.records, *history.records))
            if len(self.programs) > MOST_PROGRAMS:
                self.programs.popitem(last=False)
        self.programs.move_to_end(key)
        self.executor, emitted, history = self.programs[key]
        self.last = emitted, history
        return self.executor

    def _make(self, owned: Step, names: Names, watch: Watch, memory: SharedSlots) -> Made:
        symmetric = self.store.symmetric() if owned.machine.device == "cuda" else frozenset()
        scheduled, history = lower(owned, names, self.options, self.observers, symmetric)
        emitted, last = emit(scheduled, self.rank, self.observers)
        for template in emitted.templates:
            for eager in eager_steps(template):
                eager.tasks = self
        device = next((p.device for p in self.store.params.values()), torch.device("cpu"))
        executor = Executor(emitted.program, device, self.groups, watch, self, memory, self.options.cuda_graphs)
        return executor, emitted, History((*history.records, *last.records))

    def _first_step(self, fresh: Names, watch: Watch) -> None:
        self._scratch = {name: {} for name in fresh}
        for name in fresh:
            self.store.allocate(name)
        executor, _, _ = self._make(self.plan.first, fresh, watch, SharedSlots())  # not kept: its buffers are large
        executor.run()
        for name in fresh:
            self.store.install(name)
        self._scratch = {}

    # -- what programs and eager steps ask for -------------------------------------------------------

    def fragment(self, role: Role, leaf: str, task: str) -> Tensor:
        return self.store.fragment(role, leaf, task)

    def resident(self, leaf: str, task: str) -> Tensor:
        return self.store.residents[task, leaf]

    def number_of(self, template: str, group: int, name: str) -> Any:
        return self.cohorts.number(template, group, name)

    def eager_optimizer(self) -> Optimizer:
        return self.optimizer

    def group_of(self, task: str) -> dict[str, Any]:
        return self.optimizer.param_groups[self.plan.bound[task].group]

    def drew_random_numbers(self, task: str) -> None:
        """Warn once; raise where several ranks compute the task, each with numbers of its own."""
        own, kind = self.plan.owned.task(task), plain_class(self.optimizer).__name__
        if own.owner is None and own.layout.grid.size > 1:
            raise UnsupportedOptimizer(
                f"{kind} draws random numbers, and every rank computes this matrix: their copies would differ",
                at=task,
                hint='wrap with strategy="owner"',
            )
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{kind} draws random numbers (first for {task}). They come from the generator of the matrix's "
                "owner, so the result is not, bit by bit, that of the plain optimizer on one device.",
                stacklevel=2,
            )

    def state_of(self, task: str) -> dict[str, Any]:
        """Scratch for the first step of a compiled task; the task's own state where every step is eager."""
        bound = self.plan.bound[task]
        return self.optimizer.state[bound.param] if bound.kind.oracle is None else self._scratch[task]
