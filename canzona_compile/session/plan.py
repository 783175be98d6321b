"""Make plans from bound parameters: which passes run, in which order, on which tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from canzona_compile.capture.param_kind import ParamKind
from canzona_compile.compat.telling import tell
from canzona_compile.eager.nodes import interpreted_template
from canzona_compile.errors import UnsupportedOptimizer
from canzona_compile.ir.layout import Layout
from canzona_compile.ir.options import Options, capacity_within
from canzona_compile.ir.pipeline import Observer, PassHistory, run
from canzona_compile.ir.step import Form, Leaf, Placed, Step, Task, Template
from canzona_compile.ir.storage import StateRules, Storage
from canzona_compile.ir.variant_period import VariantPeriod
from canzona_compile.machine.hardware import Hardware, Machine
from canzona_compile.passes import emission_passes, first_step_passes, lowering_passes, planning_passes
from canzona_compile.passes.stagger import Stagger, stagger
from canzona_compile.replica.parameter_spec import ParameterSpec
from canzona_compile.views.entries import cut_along_experts
from canzona_compile.views.fragment import FragmentView
from canzona_compile.views.pieces import PiecesView
from canzona_compile.views.view import ParamView

# -- what is bound ----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, slots=True)
class BoundParam:
    """A parameter of the optimizer, or one piece of a fused parameter, with its task.

    Attributes:
        param: what a step sees: the parameter itself, or what the last of its views shows.
        spec: what the optimizer's code can see of it, or of this rank's entries if the task is theirs.
        stand_in: shows the optimizer's parameter if that is a plain fragment; None otherwise.
        division: shows the fused parameter that it is a piece of; None for a whole parameter.
        code: see `kind`; None until it is captured, as the template of the task is empty until then.
        rehearsed: the optimizer's parameter whose state this one has under ZeRO-1, where `param` is a double of it.
    """

    param: Tensor
    task: Task
    spec: ParameterSpec
    stand_in: FragmentView | None = None
    division: PiecesView | None = None
    code: ParamKind | None = None
    rehearsed: Tensor | None = None

    @property
    def kind(self) -> ParamKind:
        """Its captured code and the leaves of its state."""
        assert self.code is not None
        return self.code

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """The tensor leaves of its state."""
        return self.kind.leaves(self.task.shape)

    @property
    def views(self) -> tuple[ParamView, ...]:
        """How the optimizer's own parameter becomes `param`, view after view."""
        return tuple(view for view in (self.stand_in, self.division) if view is not None)

    @property
    def name(self) -> str:
        """The name of the optimizer's own parameter."""
        return next((view.name for view in self.views), self.task.name)

    @property
    def origin(self) -> Tensor:
        """The optimizer's own parameter."""
        return next((view.source for view in self.views), self.param)

    @property
    def stacked(self) -> bool:
        """Whether it is a stack that is cut between its matrices, so that each rank holds entries of it."""
        whole = self.param if self.division is None else self.division.source
        return cut_along_experts(whole) and (self.division is None or self.division.keeps_entries)

    def stepped_by(self, kind: ParamKind) -> BoundParam:
        """Bind it to its code."""
        return replace(self, task=replace(self.task, template=kind.template.name), code=kind)

    def entries_at(self, layout: Layout) -> BoundParam:
        """Bind this rank's entries of it alone, which have this layout."""
        spec = replace(self.spec, shape=layout.shape, part=True)
        return replace(self, task=replace(self.task, layout=layout), spec=spec)

    def shown_by(self, view: PiecesView) -> tuple[BoundParam, ...]:
        """Bind the pieces of it that a view shows, each to a task of its own."""
        found = []
        for i, (part, param) in enumerate(zip(view.shown, view.params, strict=True)):
            layout = view.layout_of(part.name, self.task.layout)
            task = replace(self.task, name=part.name, index=self.task.index + i, layout=layout)
            spec = replace(self.spec, shape=layout.shape)
            found.append(replace(self, param=param, task=task, spec=spec, division=view))
        return tuple(found)


StorageOf = Callable[[str, torch.dtype], Storage | None]  # by the name of a leaf, and its dtype


# -- plans ------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Plan:
    """The decisions that stay the same until the parameters change.

    Attributes:
        bound: all parameters, and pieces of fused parameters, by the name of their task.
        owned: the step with every task that does more than elementwise work, and its owner rank.
        first: the step with the same tasks before they have state; all of them are interpreted.
        elementwise: the parameters that the optimizer's own step updates, each rank on its own fragments.
        known: the names of all templates, those of further variants included.
        stagger: which tasks do their periodic work earlier, and the predicted effect.
        history: the record of the passes from CAPTURED to OWNED.
        rules: how users want state to be stored; None for as it is.
    """

    bound: dict[str, BoundParam]
    owned: Step
    first: Step
    elementwise: tuple[BoundParam, ...]
    known: frozenset[str]
    stagger: Stagger
    history: PassHistory
    rules: StateRules | None = None

    @cached_property
    def views(self) -> tuple[ParamView, ...]:
        """What shows parameters of the optimizer as those in `bound`, each after the view that shows its source."""
        return tuple(dict.fromkeys(view for b in self.bound.values() for view in b.views))

    def placed(self, task: str) -> Placed:
        """Return the placed template of a task."""
        return self.owned.placed_of(self.owned.task(task))

    def leaves(self, task: str) -> tuple[Leaf, ...]:
        """Return the tensor leaves of the state of a parameter, each with how it is stored."""
        return with_storage(self.bound[task].leaves, self.placed(task))

    def storages(self, task: str) -> StorageOf:
        """Return what tells how leaves of a parameter's state are stored that no program works on."""
        template = self._templates[self.bound[task].kind.template.name]
        if template.interpreted:
            return (lambda *_: None) if self.rules is None else self.rules.of_eager
        marked = {leaf.name: leaf.stored for leaf in template.leaves}
        return lambda name, _: marked.get(name)

    @cached_property
    def _templates(self) -> dict[str, Template]:
        return {template.name: template for template in self.owned.templates}


def with_storage(leaves: Iterable[Leaf], placed: Placed) -> tuple[Leaf, ...]:
    """Return leaves of the state with how they are stored."""
    stored = placed.stored
    return tuple(replace(leaf, stored=stored.get(leaf.name)) if stored else leaf for leaf in leaves)


def taking(owned: Step, assignment: Iterable[tuple[str, int, Sequence[str]]]) -> Step:
    """Return a copy of an owned step with the variants that its tasks take on one step.

    Args:
        owned: the owned step.
        assignment: the name of a template, the label of its numbers, and the names of the tasks that take it. Tasks
            that the assignment does not name keep their template.
    """
    cuts = {(p.template.name, p.kind): p.name for p in owned.placed}
    taken = {name: (template, label) for template, label, names in assignment for name in names}
    tasks = []
    for task in owned.tasks:
        template, label = taken.get(task.name, (task.template, task.param_group))
        placed = cuts[template, owned.placed_of(task).kind]
        tasks.append(replace(task, template=template, placed=placed, param_group=label))
    return replace(owned, tasks=tuple(tasks))


def machine_of(devices: Iterable[torch.device], rates: Hardware | None = None) -> Machine:
    """Describe the machine with the devices of parameters.

    Args:
        rates: the rates of the hardware; None takes those that are assumed for the kind of device.
    """
    kinds = sorted({device.type for device in devices})
    device = kinds[0] if kinds else "cpu"
    backend = str(dist.get_backend()) if dist.is_available() and dist.is_initialized() else ""
    return Machine(device, backend, torch.get_num_threads() if device == "cpu" else 1, rates)


def captured_step(bound: Sequence[BoundParam], optimizer: str, options: Options) -> Step:
    """Make the CAPTURED step of bound parameters."""
    templates = {t.name: t for b in bound for t in b.kind.templates.values()}
    machine = machine_of((b.spec.device for b in bound), options.rates)
    return Step(Form.CAPTURED, optimizer, machine, tuple(templates.values()), tuple(b.task for b in bound))


def joined(parts: Sequence[Step]) -> Step:
    """Put the CAPTURED steps of several optimizers together. Templates of equal names get numbers."""
    if len(parts) == 1:
        return parts[0]
    templates: list[Template] = []
    tasks = []
    groups = 0
    for number, part in enumerate(parts):
        taken = {t.name for t in templates}
        names = {t.name: t.name if t.name not in taken else f"{t.name}_{number}" for t in part.templates}
        families = {t.family: f"{t.family}_{number}" if t.family and number else t.family for t in part.templates}
        templates += [replace(t, name=names[t.name], family=families[t.family]) for t in part.templates]
        tasks += [replace(t, template=names[t.template], param_group=t.param_group + groups) for t in part.tasks]
        groups += 1 + max((t.param_group for t in part.tasks), default=0)
    tasks.sort(key=lambda t: t.index)
    return Step(Form.CAPTURED, "+".join(p.optimizer for p in parts), parts[0].machine, tuple(templates), tuple(tasks))


def make_plan(
    bound: Sequence[BoundParam],
    optimizer: str,
    options: Options,
    observers: Sequence[Observer] = (),
    owned_as: Step | None = None,
    complete: bool = True,
) -> Plan:
    """Make the plan of an optimizer: give every task that needs one an owner rank.

    Args:
        owned_as: a step that has the owners of the same tasks already; None if they are to be chosen.
        complete: whether these are the parameters of all optimizers that step together.
    """
    tell(f"planning {len(bound)} parameters")
    captured = captured_step(bound, optimizer, options)
    owned, history = run(captured, planning_passes(options, owned_as, complete), observers)
    by_name = {b.task.name: b for b in bound}
    check_pieces(bound, owned)
    return Plan(
        by_name,
        owned,
        first_steps(owned, by_name),
        tuple(b for b in bound if owned.find(b.task.name) is None),
        frozenset(t.name for t in captured.templates),
        stagger(owned, variant_periods(bound)),
        history,
        options.state,
    )


def variant_periods(bound: Iterable[BoundParam]) -> dict[str, VariantPeriod]:
    """By task, how its code continues from step to step, where that is known."""
    return {b.task.name: b.kind.variant_period for b in bound if b.kind.variant_period is not None}


def check_pieces(bound: Iterable[BoundParam], owned: Step) -> None:
    """Raise unless all pieces of each fused parameter need an owner.

    Args:
        owned: the step in which what needs an owner is a task.
    """
    for b in bound:
        if b.division is not None and owned.find(b.task.name) is None:
            raise UnsupportedOptimizer(
                "the optimizer updates this part of split= elementwise, but other parts of the parameter as matrices",
                at=b.task.name,
                hint="split the parameter into parts that the optimizer updates in the same way",
            )


def first_steps(owned: Step, bound: dict[str, BoundParam]) -> Step:
    """Make the step in which every task runs interpreted, before it has state.

    Args:
        owned: the owned step. The result has its owner ranks, and keeps state where it keeps state.
    """
    templates: dict[str, Template] = {}
    tasks: list[Task] = []
    for task in owned.tasks:
        placed, own = owned.placed_of(task), bound[task.name]
        name = f"{placed.name}_first"
        if name not in templates:
            leaves = with_storage(own.leaves, placed)
            made = interpreted_template(name, own.spec, "first step: creates the state", leaves)
            templates[name] = replace(made, resident=placed.resident)
        tasks.append(Task(task.name, task.index, task.param_group, name, task.layout))
    first = Step(Form.CAPTURED, owned.optimizer, owned.machine, tuple(templates.values()), tuple(tasks))
    return run(first, first_step_passes(owned))[0]


def lower(
    step: Step,
    names: Sequence[str],
    options: Options,
    observers: Sequence[Observer] = (),
    symmetric: frozenset[tuple[str, str]] = frozenset(),
) -> tuple[Step, PassHistory]:
    """Schedule some tasks of an owned step.

    The result is the same on every rank, except for what depends on `symmetric`.

    Args:
        step: the owned step.
        symmetric: (template family, leaf) of the state on this rank that is symmetric, see `StateStore.symmetric`.
    """
    wanted = set(names)
    tasks = tuple(t for t in step.tasks if t.name in wanted)
    placed, variants = {p.name: p for p in step.placed}, step.variants()
    cuts = {p for t in tasks for p in variants[placed[t.placed]]}
    templates = {p.template.name for p in cuts}
    part = replace(
        step,
        tasks=tasks,
        placed=tuple(p for p in step.placed if p in cuts),
        templates=tuple(t for t in step.templates if t.name in templates),
    )
    return run(part, lowering_passes(options, symmetric), observers)


def proposed_capacity(every: Sequence[Options], free: int | None) -> int:
    """The capacity that this rank proposes for a plan: one of before, or by the free bytes, if known; 0 for none.

    The options are those of the optimizer that plans, and then those of a chain, whose members have one capacity.
    """
    if every[0].capacity is not None or every[0].plan is not None or free is None:
        return 0
    known = [size for options in every for _, size in options.agreed]
    return min(known, default=capacity_within(free))


def whole(plan: Plan, options: Options) -> Step:
    """Return the scheduled step of a plan in which all tasks have gradients."""
    return lower(plan.owned, [task.name for task in plan.owned.tasks], options)[0]


def emit(step: Step, rank: int, observers: Sequence[Observer] = ()) -> tuple[Step, PassHistory]:
    """Emit the program of one rank from a scheduled step; return the step with it and the record of the passes."""
    return run(step, emission_passes(rank, step.machine), observers)
