"""From bound parameters to plans: which passes run, in which order, on which tasks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from canzona_compile.capture.dynamo_oracle import ParameterSpec
from canzona_compile.capture.eager_fallback import interpreted_template
from canzona_compile.errors import UnsupportedOptimizer
from canzona_compile.ir.hardware import Hardware
from canzona_compile.ir.pipeline import Observer, PassHistory, run
from canzona_compile.ir.step import Form, Machine, Placed, Step, Task, Template
from canzona_compile.options import Options
from canzona_compile.passes import emission_passes, first_step_passes, lowering_passes, planning_passes
from canzona_compile.session.bind import BoundParam
from canzona_compile.session.fused_params import Fused
from canzona_compile.session.stagger import Stagger, stagger


@dataclass(frozen=True, eq=False, slots=True)
class Plan:
    """What does not change until parameters do.

    Attributes:
        owned: every task that has holistic work, with its owner.
        first: the same tasks as they run before they have state: interpreted.
        elementwise: parameters that the optimizer's own step updates on their fragments.
        known: names of all templates, variants included.
        stagger: which tasks do their periodic work earlier, and what that changes.
        fused: parameters of several logical matrices, whose pieces are among `bound`.
        history: of the passes from CAPTURED to OWNED.
    """

    bound: dict[str, BoundParam]
    owned: Step
    first: Step
    elementwise: tuple[BoundParam, ...]
    known: frozenset[str]
    stagger: Stagger
    fused: tuple[Fused, ...]
    history: PassHistory

    def placed(self, task: str) -> Placed:
        return self.owned.placed_of(self.owned.task(task))

    def taking(self, lineup: Iterable[tuple[str, int, Sequence[str]]]) -> Step:
        """The owned step, with the variant (and the label of its numbers) that the tasks of a lineup take."""
        cuts = {(p.template.name, p.kind): p.name for p in self.owned.placed}
        taken = {name: (template, label) for template, label, names in lineup for name in names}
        tasks = []
        for task in self.owned.tasks:
            template, label = taken.get(task.name, (task.template, task.param_group))
            placed = cuts[template, self.placed(task.name).kind]
            tasks.append(replace(task, template=template, placed=placed, param_group=label))
        return replace(self.owned, tasks=tuple(tasks))


def machine_of(params: Iterable[torch.Tensor], rates: Hardware | None = None) -> Machine:
    kinds = sorted({p.device.type for p in params})
    device = kinds[0] if kinds else "cpu"
    backend = str(dist.get_backend()) if dist.is_available() and dist.is_initialized() else ""
    return Machine(device, backend, torch.get_num_threads() if device == "cpu" else 1, rates)


def make_plan(
    bound: Sequence[BoundParam], optimizer: str, options: Options, observers: Sequence[Observer] = ()
) -> Plan:
    """Own every task that needs an owner."""
    templates = {t.name: t for b in bound for t in b.kind.templates.values()}
    captured = Step(
        Form.CAPTURED,
        optimizer,
        machine_of((b.param for b in bound), options.hardware),
        tuple(templates.values()),
        tuple(b.task for b in bound),
    )
    owned, history = run(captured, planning_passes(options), observers)
    by_name = {b.task.name: b for b in bound}
    matrices = {t.name for t in owned.tasks}
    if odd := [b.task.name for b in bound if b.fused is not None and b.task.name not in matrices]:
        raise UnsupportedOptimizer(
            "the optimizer's work on this piece is elementwise, on others of its parameter it is not",
            at=odd[0],
            hint="split the parameter in pieces that the optimizer treats alike",
        )
    courses = {b.task.name: b.kind.course for b in bound if b.kind.course is not None}
    return Plan(
        by_name,
        owned,
        first_steps(owned, by_name),
        tuple(b for b in bound if b.task.name not in matrices),
        frozenset(templates),
        stagger(owned, courses),
        tuple(dict.fromkeys(b.fused for b in bound if b.fused is not None)),
        history,
    )


def first_steps(owned: Step, bound: dict[str, BoundParam]) -> Step:
    """The first step of every task: interpreted, with the owners and the homes of the state of `owned`."""
    templates: dict[str, Template] = {}
    tasks: list[Task] = []
    for task in owned.tasks:
        placed, kind = owned.placed_of(task), bound[task.name].kind
        name = f"{placed.name}_first"
        if name not in templates:
            device = bound[task.name].param.device
            spec = ParameterSpec(task.shape, kind.template.dtype, kind.grad_dtype, device)
            made = interpreted_template(name, spec, "first step: creates the state", kind.state)
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
    """Schedule the tasks `names` of an owned step; the same on every rank, but for what `symmetric` says of its own."""
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


def emit(step: Step, rank: int, observers: Sequence[Observer] = ()) -> tuple[Step, PassHistory]:
    """The program of one rank."""
    return run(step, emission_passes(rank, step.machine), observers)
