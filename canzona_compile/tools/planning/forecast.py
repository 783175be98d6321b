"""Makes a forecast of a scheduled step: simulates the step and its alternatives, and sums up the figures.

Seconds of whole steps come from the simulation (`simulation`). Seconds of one matrix by itself, and of
strategies, come from the FLOPs and bytes of its graphs (`analysis.roofline`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from canzona_compile.analysis.flops import flops_of, symbolic_bytes
from canzona_compile.analysis.roofline import PlacedTime, exchange_seconds, placed_time
from canzona_compile.ir.bucket import Bucket
from canzona_compile.ir.options import Options
from canzona_compile.ir.pipeline import run
from canzona_compile.ir.step import Placed, Step, Strategy, Task
from canzona_compile.ir.variant_period import VariantPeriod
from canzona_compile.machine.hardware import Hardware
from canzona_compile.ownership import PLANNERS
from canzona_compile.passes import relowering_passes
from canzona_compile.passes.stagger import LONGEST
from canzona_compile.report.build import figures_of, imbalance, rank_loads
from canzona_compile.report.schema import LoadReport
from canzona_compile.report.units import format_seconds, plural
from canzona_compile.session.plan import taking
from canzona_compile.simulation.engine import Simulation
from canzona_compile.simulation.simulate import matrices_by_rank, simulate
from canzona_compile.tools.planning.figures import (
    Alternative,
    Forecast,
    MemoryForecast,
    PeriodForecast,
    PhaseForecast,
    StrategyForecast,
    TemplateCost,
    Zero1Forecast,
)
from canzona_compile.tools.planning.lowered import LoweredPlan, Request, passes_around

Templates = tuple[str, ...]  # of all tasks with a period, in their order
ABOUT = {"replicated": "every rank computes everything", **{name: kind.about for name, kind in PLANNERS.items()}}


def forecast(
    made: LoweredPlan,
    digest: str,
    request: Request,
    others: Mapping[str, Callable[[], LoweredPlan]],
    say: Callable[[str], None],
) -> Forecast:
    """Work out all figures of a plan.

    Returns:
        The figures: predicted seconds, and counted bytes and FLOPs.
    """
    hardware, step = request.hardware, made.scheduled
    say("simulating the step")
    simulation = simulate(step, hardware, shown=() if request.rank is None else (request.rank,))
    figures = figures_of(step, made.owned)
    placed = {p.name: p for p in step.placed}
    name = name_of(request.options, request) if any(t.owner is not None for t in step.tasks) else "replicated"
    chosen = replace(alternative(name, made, request, simulation), about="this plan", chosen=True)
    alternatives = [chosen]
    for name, make in others.items():
        if name != chosen.name:
            say(f"comparing with {name}")
            other = make()
            alternatives.append(alternative(name, other, request, simulate(other.scheduled, hardware)))
    return Forecast(
        **figures,
        fingerprint=digest,
        model=request.model.name,
        matrices=len(step.tasks),
        elements=sum(math.prod(t.shape) for t in step.tasks),
        elementwise=len(made.owned.elementwise),
        share=request.model.elements / sum(w.elements for w in request.model.everything),
        mesh=request.mesh.dims,
        hardware=hardware,
        options=option_texts(request),
        costs=tuple(
            template_cost(
                placed[one.name], [made.owned.task(t.name) for t in step.tasks if t.placed == one.name], request
            )
            for one in figures["templates"]
        ),
        memory=memory_forecast(step, request, simulation),
        simulation=simulation,
        alternatives=tuple(alternatives),
        assumptions=assumptions(request, step),
        zero1=chosen.zero1,
    )


def alternative(name: str, made: LoweredPlan, request: Request, found: Simulation) -> Alternative:
    """Work out the headline figures of a plan."""
    step, loads, zero1 = made.scheduled, loads_of(made), None
    if step.buckets:
        zero1 = zero1_forecast(step.buckets, loads, found, request, name == name_of(request.options, request))
    return Alternative(
        name=name,
        about=ABOUT[name.split()[0]],
        imbalance=imbalance(loads),
        seconds=found.seconds,
        exposed=found.exposed,
        sent=sum(count for *_, count in found.sent),
        peak=found.peak,
        groups=len(step.micro_groups),
        zero1=zero1,
    )


def name_of(options: Options, request: Request) -> str:
    """The name of a planner among alternatives; under ZeRO-1 several alphas are compared."""
    blended = options.planner == "alpha" and request.zero1
    return f"alpha {options.alpha:g}" if blended else options.planner


def loads_of(made: LoweredPlan) -> tuple[LoadReport, ...]:
    """The load of every rank, also of those that own nothing."""
    group_of = {name: group.index for group in made.scheduled.micro_groups for name in group.tasks}
    return rank_loads(made.owned, group_of)


def zero1_forecast(
    buckets: Sequence[Bucket], loads: Sequence[LoadReport], simulation: Simulation, request: Request, shown: bool
) -> Zero1Forecast:
    """Sum up the buckets of a plan, and simulate the passes around its step.

    Args:
        loads: the FLOPs of all ranks.
    """
    ranks = len(buckets[0].ranks)
    # Every rank sends all shards but its own, in every data-parallel group.
    sent = sum(b.starts[-1] * b.dtype.itemsize for b in buckets) * (ranks - 1) * (request.mesh.ranks // ranks)
    backward, forward = passes_around(request, buckets)
    step = PhaseForecast("step", simulation.seconds, simulation.exposed, 0, 0, ())
    counted = sum(b.collectives for b in buckets) if ranks > 1 else 0
    around = [
        PhaseForecast(name, own.seconds, own.exposed, sent, counted, own.spans if shown else ())
        for name, own in (("backward", backward), ("forward", forward))
    ]
    return Zero1Forecast(
        padding_share=sum(b.padding for b in buckets) / sum(b.elements for b in buckets),
        makespan=max((load.flops for load in loads), default=0),
        phases=(around[0], step, around[1]),
    )


def template_cost(placed: Placed, tasks: Sequence[Task], request: Request) -> TemplateCost:
    time = placed_time(placed, request.hardware)
    return TemplateCost(
        placed.kind.matrices * flops_of(symbolic_bytes(placed.compute, placed.template), placed.template.shape),
        time.compute.total(request.hardware),
        strategies(time, tasks, request.hardware, request.zero1),
    )


def memory_forecast(step: Step, request: Request, simulation: Simulation) -> MemoryForecast:
    one, _ = run(step, relowering_passes(replace(request.options, micro_groups=1, capacity=1 << 62)))
    held, everywhere = held_state(step, step.tasks)
    return MemoryForecast(
        buffers=simulation.peak,
        one_group=simulate(one, request.hardware).peak,
        state=most(own for own, _ in held.values()),
        state_host=most(own for _, own in held.values()),
        state_replicated=most(everywhere.values()),
    )


def held_state(step: Step, tasks: Sequence[Task]) -> tuple[dict[int, tuple[float, float]], dict[int, float]]:
    """Count the bytes of state by rank.

    Returns:
        Those on its device and in host memory, as planned; and those if each rank held all state of its grid.
    """
    held: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
    everywhere: dict[int, float] = defaultdict(float)
    placed = {p.name: p for p in step.placed}
    alike: dict[tuple[int, str], list[Task]] = defaultdict(list)  # by layout and cut
    for task in tasks:
        alike[id(task.layout), task.placed].append(task)
    for (_, name), same_kind in alike.items():
        cut, layout = placed[name], same_kind[0].layout
        for leaf in cut.leaves:
            place = int(leaf.stored is not None and leaf.stored.host)
            whole, spread = leaf.nbytes(leaf.shape), leaf.shape == layout.shape
            for s, box in enumerate(layout.boxes):
                own = 0.0 if leaf.name in cut.resident else leaf.nbytes(box.size) if spread else whole
                for row in layout.grid.ranks:
                    held[row[s]][place] += len(same_kind) * own
                    everywhere[row[s]] += len(same_kind) * whole
            for task in same_kind if leaf.name in cut.resident else ():
                for rank in task.ranks:
                    held[rank][place] += whole
    return {rank: (device, host) for rank, (device, host) in held.items()}, everywhere


def most(sizes: Iterable[float]) -> int:
    """The largest of some numbers of bytes."""
    return int(max(sizes, default=0))


def option_texts(request: Request) -> tuple[tuple[str, str], ...]:
    own = request.options
    names = ("strategy", "planner", "alpha", "capacity", "micro_groups", "depth", "numerics")
    given = {name: getattr(own, name) for name in names}
    given |= {} if own.state is None else {"state": own.state}
    given |= {"micro_groups": own.micro_groups or "chosen", "updates": request.updates}
    if request.zero1:
        given |= {"bucket_bytes": request.bucket_bytes, "tokens": request.tokens, "gather": request.gather}
    if request.rank is not None:
        given["rank"] = request.rank
    return tuple((name, str(value)) for name, value in given.items())


def assumptions(request: Request, step: Step) -> tuple[str, ...]:
    """List what the predictions assume in addition to the rates, in words."""
    found = [
        "nothing is fused: each operator reads its operands from memory and writes its result",
        "ranks are numbered along the mesh, the last dim fastest, and nodes hold consecutive ranks",
        "gradients are there when the step begins",
    ]
    if request.hardware.device != "cpu" and (held := matrices_by_rank(step)):
        most = max(held.values())
        books = format_seconds(most * request.hardware.host)
        found.append(
            f"the host takes {books} for the {plural(most, 'matrix', 'matrices')} of a rank while the device computes; "
            "a step takes at least as long"
        )
    if request.zero1:
        found += [
            "only the owner's replica updates a matrix; the owners of slices update the other parameters, in no time",
            f"{request.tokens} tokens per data-parallel rank; passes take 6 FLOPs per weight and token, at the rate of"
            " products; attention, activations and the traffic of tensor parallelism take no time",
            "an uneven bucket takes a collective per shard, one after the other",
        ]
        if request.replicas > 1:
            found.append(
                f"this is one of {request.replicas} replicas; each bucket is summed over them once it is reduced"
            )
    elif any(t.layout.grid.replicas > 1 for t in step.tasks):
        found.append("every replica applies all updates, and their exchange is part of the step")
    if request.hardware.assumed:
        found.append(f"rates are assumed, not measured: {', '.join(request.hardware.assumed)}")
    return tuple(found)


def strategies(
    time: PlacedTime, tasks: Sequence[Task], hardware: Hardware, zero1: bool
) -> tuple[StrategyForecast, ...]:
    """Predict every strategy for tasks that share a cut and a grid.

    Returns:
        A forecast for each strategy, in seconds for all of the tasks: every matrix has one owner, and no rank owns more
        than its even share, rounded up; or every rank gathers and computes every matrix.
    """
    grid, count, compute = tasks[0].layout.grid, len(tasks), time.compute.total(hardware)
    most = math.ceil(count / grid.size)

    def transfer(busiest: float) -> float:
        """Seconds of an exchange within a replica whose busiest rank moves this many bytes."""
        return exchange_seconds(hardware.link(grid.ranks[0]), busiest, grid.shards) if grid.shards > 1 else 0.0

    scatter = transfer(most * time.scattered)
    if grid.replicas > 1 and not zero1:
        between = hardware.link(tuple(row[0] for row in grid.ranks))
        received = count * time.scattered / grid.shards * (1 - 1 / grid.replicas)
        scatter += received / between.bandwidth + between.latency
    share = "one rank" if grid.size == 1 else f"{most} on the busiest of {grid.size} ranks"
    taken = {task.strategy for task in tasks}
    return tuple(
        StrategyForecast(str(strategy), sum(parts), *parts, strategy in taken, note)
        for strategy, parts, note in (
            (Strategy.OWNER, (most * compute, transfer(most * time.gathered), scatter), share),
            (Strategy.REPLICATED, (count * compute, transfer(count * time.gathered), 0.0), "every rank computes all"),
        )
    )


def period_forecast(
    owned: Step, periods: Mapping[str, VariantPeriod], seconds_of: Callable[[Step], float]
) -> PeriodForecast | None:
    """Predict the steps of a period.

    Args:
        owned: the step with owners, in which every task has its heaviest variant.
        seconds_of: predicts an owned step.

    Returns:
        The prediction; None if every step does the same.
    """
    periodic = {t.name: periods[t.name] for t in owned.tasks if t.name in periods and periods[t.name].periodic}
    if not periodic:
        return None
    horizon = min(LONGEST, math.lcm(*(len(own.period) for own in periodic.values())))
    steps = [
        tuple(own.period[(number - own.start) % len(own.period)] for own in periodic.values())
        for number in range(horizon)
    ]
    groups = {task.name: task.param_group for task in owned.tasks}
    known: dict[Templates, float] = {}
    for templates in dict.fromkeys(steps):
        assignment = [(template, groups[name], [name]) for name, template in zip(periodic, templates, strict=True)]
        known[templates] = seconds_of(taking(owned, assignment))
    seconds = tuple(known[templates] for templates in steps)
    return PeriodForecast(seconds, sum(seconds) / len(seconds), max(seconds))
