"""From a scheduled step to a forecast: simulate it, and its alternatives, and add up what people ask for."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import sympy

from canzona_compile.cost import dim_symbols, flops_of, symbolic_bytes
from canzona_compile.figures import LoadReport
from canzona_compile.hardware import Hardware
from canzona_compile.ir import Phase, Placed, Role, Step, Task
from canzona_compile.layout import Grid, Layout
from canzona_compile.options import Options
from canzona_compile.planner import lowering_passes
from canzona_compile.planning.figures import (
    Alternative,
    Forecast,
    GroupForecast,
    MemoryForecast,
    TaskForecast,
    TemplateForecast,
)
from canzona_compile.planning.mesh import Mesh
from canzona_compile.planning.strategies import strategies
from canzona_compile.planning.weights import Model
from canzona_compile.report import rank_loads
from canzona_compile.simulation.figures import Simulation
from canzona_compile.simulation.simulate import simulate
from canzona_compile.timing import PlacedTime, placed_time

ABOUT = {
    "static": "the rank in whose share of the buffer a matrix starts (Canzona's equation 1)",
    "alpha": "cuts of the buffer balanced by elements (Canzona's algorithm 1)",
    "lpt": "largest first, to replicas and then to ranks within",
    "joint": "largest first over all ranks, then swaps",
    "permuted": "the buffer reordered so that shards are equal",
    "exact": "mixed-integer programming",
    "replicated": "every rank computes everything",
}
PARAMETER_BYTES = 2  # of an element when parameters are gathered for a forward pass in 16 bits


@dataclass(frozen=True, slots=True)
class Request:
    """What a forecast is asked for, beside the step."""

    model: Model
    mesh: Mesh
    hardware: Hardware
    options: Options
    updates: str
    rank: int | None
    elementwise: int


def forecast(
    step: Step, digest: str, request: Request, others: Mapping[str, Callable[[], Step]], say: Callable[[str], None]
) -> Forecast:
    """All figures of a plan.

    Args:
        step: SCHEDULED, for all matrices of the model.
        digest: its fingerprint.
        others: alternatives by name, made when they are called.
        say: told what is being done.
    """
    hardware, options = request.hardware, request.options
    say("simulating the step")
    shown = () if request.rank is None else (request.rank,)
    simulation = simulated(step, request, shown)
    placed = {p.name: p for p in step.placed}
    group_of = {name: group.index for group in step.groups for name in group.tasks}
    loads = rank_loads(step, placed, group_of)
    times = {name: placed_time(p, hardware) for name, p in placed.items() if any(t.placed == name for t in step.tasks)}
    chosen = Alternative(
        name=options.planner if options.strategy != "replicated" else "replicated",
        about="this plan",
        imbalance=imbalance(loads),
        seconds=simulation.seconds,
        exposed=max((r.exposed for r in simulation.ranks), default=0.0),
        sent=sum(count for *_, count in simulation.sent),
        peak=max((r.peak for r in simulation.ranks), default=0),
        groups=len(step.groups),
        chosen=True,
    )
    alternatives = [chosen]
    for name, make in others.items():
        if name != chosen.name:
            say(f"comparing with {name}")
            alternatives.append(alternative(name, make(), request))
    return Forecast(
        fingerprint=digest,
        model=request.model.name,
        optimizer=step.optimizer,
        matrices=len(step.tasks),
        elements=sum(math.prod(t.shape) for t in step.tasks),
        elementwise=request.elementwise,
        mesh=request.mesh.dims,
        hardware=hardware,
        options=option_texts(request),
        imbalance=chosen.imbalance,
        depth=step.depth,
        collectives=sum(len(group.exchanges) for group in step.groups),
        hidden=hidden_seconds(step, request),
        templates=tuple(
            template_forecast(p, [t for t in step.tasks if t.placed == p.name], times[p.name], hardware)
            for p in step.placed
            if p.name in times
        ),
        tasks=tuple(task_forecast(t, placed[t.placed], group_of[t.name]) for t in step.tasks),
        groups=group_forecasts(step, simulation, placed),
        loads=loads,
        memory=memory_forecast(step, request, simulation),
        simulation=simulation,
        alternatives=tuple(alternatives),
        assumptions=assumptions(request, step),
    )


def simulated(step: Step, request: Request, shown: Sequence[int] = ()) -> Simulation:
    """The step as `updates` says: all of it, or what a framework with ZeRO-1 leaves of it."""
    if request.updates == "zero1":
        step = zero1(step, request.options)
    return simulate(step, request.hardware, shown=shown)


def zero1(step: Step, options: Options) -> Step:
    """The owner's replica alone gathers, computes and applies; the others get parameters in the forward pass."""
    layouts: dict[tuple[int, int], Layout] = {}

    def alone(task: Task) -> Task:
        if task.owner is None or task.layout.grid.replicas == 1:
            return task
        key = (id(task.layout), task.owner[0])
        if key not in layouts:
            layouts[key] = replace(task.layout, grid=Grid((task.layout.grid.ranks[task.owner[0]],)))
        return replace(task, layout=layouts[key], owner=(0, task.owner[1]))

    changed = replace(step, tasks=tuple(map(alone, step.tasks)))
    for current in lowering_passes(options):
        changed = current(changed)
    return changed


def hidden_seconds(step: Step, request: Request) -> float:
    """Of gathering parameters over replicas, which ZeRO-1 overlaps with the forward pass."""
    if request.updates != "zero1":
        return 0.0
    grids = {t.layout.grid for t in step.tasks if t.layout.grid.replicas > 1}
    found = 0.0
    for grid in grids:
        owned = sum(math.prod(t.shape) for t in step.tasks if t.layout.grid == grid)
        link = request.hardware.link(tuple(row[0] for row in grid.ranks))
        found += owned / grid.shards * PARAMETER_BYTES * (1 - 1 / grid.replicas) / link.bandwidth
    return found


def alternative(name: str, step: Step, request: Request) -> Alternative:
    placed = {p.name: p for p in step.placed}
    found = simulated(step, request)
    return Alternative(
        name=name,
        about=ABOUT[name],
        imbalance=imbalance(rank_loads(step, placed, {n: g.index for g in step.groups for n in g.tasks})),
        seconds=found.seconds,
        exposed=max((r.exposed for r in found.ranks), default=0.0),
        sent=sum(count for *_, count in found.sent),
        peak=max((r.peak for r in found.ranks), default=0),
        groups=len(step.groups),
    )


def imbalance(loads: Sequence[LoadReport]) -> float:
    total = sum(one.flops for one in loads)
    return max(one.flops for one in loads) * len(loads) / total if total else 1.0


def template_forecast(
    placed: Placed, tasks: Sequence[Task], time: PlacedTime, hardware: Hardware
) -> TemplateForecast:
    wire = wire_formula(placed)
    return TemplateForecast(
        name=placed.name,
        shape=placed.template.shape,
        tasks=len(tasks),
        flops=str(placed.cost),
        memory=str(symbolic_bytes(placed.compute, placed.template)),
        wire=str(wire),
        flops_value=placed.flops,
        memory_value=value_of(symbolic_bytes(placed.compute, placed.template), placed),
        wire_value=time.gathered + time.scattered,
        seconds=time.compute.total(hardware),
        resident=placed.resident,
        strategies=strategies(placed, time, tasks, hardware),
    )


def wire_formula(placed: Placed) -> sympy.Expr:
    """Bytes to and from the owner, in the dims of the matrix where a wire has them."""
    symbols = dict(zip(placed.template.shape, dim_symbols(len(placed.template.shape)), strict=True))
    total: sympy.Expr = sympy.Integer(0)
    for wire in (*placed.gather, *placed.scatter):
        total += wire.itemsize * sympy.Mul(*(symbols.get(n, sympy.Integer(n)) for n in wire.shape))
    return sympy.expand(total)


def value_of(formula: sympy.Expr, placed: Placed) -> int:
    return flops_of(formula, placed.template.shape)


def task_forecast(task: Task, placed: Placed, group: int) -> TaskForecast:
    grid = task.layout.grid
    return TaskForecast(
        name=task.name,
        shape=task.shape,
        template=task.placed,
        layout=f"{task.layout.placements} on {grid.replicas}x{grid.shards}",
        strategy=str(task.strategy),
        owner=None if task.owner is None else grid.ranks[task.owner[0]][task.owner[1]],
        group=group,
        flops=placed.flops,
    )


def group_forecasts(step: Step, simulation: Simulation, placed: Mapping[str, Placed]) -> tuple[GroupForecast, ...]:
    sent: dict[tuple[int, str], int] = defaultdict(int)
    for index, phase, count in simulation.sent:
        sent[index, phase] += count
    found = []
    for group in step.groups:
        tasks = [step.task(name) for name in group.tasks]
        work: dict[object, int] = defaultdict(int)
        for task in tasks:
            work[task.owner] += placed[task.placed].flops
        grid = tasks[0].layout.grid
        found.append(
            GroupForecast(
                group.index,
                grid.replicas,
                grid.shards,
                len(tasks),
                sent[group.index, str(Phase.GATHER)],
                sent[group.index, str(Phase.SCATTER)],
                sent[group.index, str(Phase.EXCHANGE)],
                max(work.values()),
            )
        )
    return tuple(found)


def memory_forecast(step: Step, request: Request, simulation: Simulation) -> MemoryForecast:
    one = step
    for current in lowering_passes(replace(request.options, micro_groups=1, capacity=1 << 62)):
        one = current(one)
    state, everywhere = state_bytes(step)
    return MemoryForecast(
        buffers=max((r.peak for r in simulation.ranks), default=0),
        one_group=max((r.peak for r in simulated(one, request).ranks), default=0),
        state=state,
        state_replicated=everywhere,
    )


def state_bytes(step: Step) -> tuple[int, int]:
    """Of optimizer state on the rank that has most of it; and if each rank had all of its grid's."""
    held: dict[int, float] = defaultdict(float)
    everywhere: dict[int, float] = defaultdict(float)
    placed = {p.name: p for p in step.placed}
    alike: dict[tuple[int, str], list[Task]] = defaultdict(list)  # by layout, most of which are shared, and cut
    for task in step.tasks:
        alike[id(task.layout), task.placed].append(task)
    for (_, name), tasks in alike.items():
        cut, layout = placed[name], tasks[0].layout
        leaves = cut.template.state or tuple(leaf for leaf in cut.template.inputs if leaf.role is Role.STATE)
        sizes = {leaf: math.prod(leaf.shape) * (leaf.dtype.itemsize if leaf.dtype else 8) for leaf in leaves}
        resident = sum(size for leaf, size in sizes.items() if leaf.name in cut.resident)
        spread = sum(n for leaf, n in sizes.items() if leaf.name not in cut.resident and leaf.shape == layout.shape)
        same = sum(sizes.values()) - resident - spread
        numel = max(1, math.prod(layout.shape))
        for s, box in enumerate(layout.boxes):
            for row in layout.grid.ranks:
                held[row[s]] += len(tasks) * (spread * box.numel / numel + same)
                everywhere[row[s]] += len(tasks) * sum(sizes.values())
        for task in tasks if resident else ():
            owners = layout.grid.members() if task.owner is None else [layout.grid.ranks[task.owner[0]][task.owner[1]]]
            for rank in owners:
                held[rank] += resident
    return int(max(held.values(), default=0)), int(max(everywhere.values(), default=0))


def option_texts(request: Request) -> tuple[tuple[str, str], ...]:
    own = request.options
    names = ("strategy", "planner", "alpha", "capacity", "micro_groups", "depth", "numerics")
    given = {name: getattr(own, name) for name in names}
    given |= {"micro_groups": own.micro_groups or "chosen", "updates": request.updates}
    return tuple((name, str(value)) for name, value in given.items())


def assumptions(request: Request, step: Step) -> tuple[str, ...]:
    """In words, beside the rates."""
    found = [
        "nothing is fused: each operator reads its operands from memory and writes its result",
        "ranks are numbered along the mesh, the last dim fastest, and nodes hold consecutive ranks",
        "gradients are there when the step begins",
    ]
    if request.updates == "zero1":
        found.append(
            "replicas over dp apply updates of their own matrices only; the gather of parameters overlaps the next"
            " forward pass, as frameworks with ZeRO-1 do and this runtime does not yet"
        )
    elif any(t.layout.grid.replicas > 1 for t in step.tasks):
        found.append("every replica applies all updates, and their exchange is part of the step")
    if request.hardware.assumed:
        found.append(f"rates are assumed, not measured: {', '.join(request.hardware.assumed)}")
    return tuple(found)
