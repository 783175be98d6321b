"""Forecasts for tests: a small decoder under Muon, its step played by a simple model of a pipeline."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field, replace
from itertools import pairwise

from canzona_compile.ir.layout import Shape
from canzona_compile.machine.hardware import Hardware, named_hardware
from canzona_compile.report.schema import LoadReport
from canzona_compile.simulation.figures import COMPUTE, NETWORK, NODE, Memory, RankSummary, Simulation, Span
from canzona_compile.tools.planning.figures import (
    Alternative,
    Forecast,
    GroupForecast,
    MemoryForecast,
    StrategyForecast,
    TaskForecast,
    TemplateForecast,
)

# What users may call a parameter, and what a page must survive.
NASTY = (
    "</script><script>window.broken = 1</script>",
    "<!-- <script> never ends",
    "<img src=x onerror='window.broken = 1'>",
    "quote\" and 'quote' & ampersand &lt; \\\" backslash \\",
    "$title ${data} {0} %s",
    "line one\nline two\u2028line three\u2029end",
    "名前.重み.🪨 \ud800 alone",
    "]]> --> */ // `${1}`",
)
SHAPES = {
    "self_attn.q_proj": (4096, 4096),
    "self_attn.k_proj": (1024, 4096),
    "self_attn.v_proj": (1024, 4096),
    "self_attn.o_proj": (4096, 4096),
    "mlp.gate_proj": (12288, 4096),
    "mlp.up_proj": (12288, 4096),
    "mlp.down_proj": (4096, 12288),
}
FORMULAS = {  # by which of m and n is smaller
    True: "10*m**3 + 20*m**2*n + 2*m*n + 1",
    False: "20*m*n**2 + 2*m*n + 10*n**3 + 1",
}


@dataclass(slots=True)
class Played:
    """What happens on the ranks that are shown."""

    spans: list[Span] = field(default_factory=list)
    memory: list[Memory] = field(default_factory=list)
    compute: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    finish: dict[int, float] = field(default_factory=dict)
    sent: dict[int, int] = field(default_factory=lambda: defaultdict(int))


def forecast(
    ranks: int = 4, groups: int = 3, layers: int = 4, most_shown: int = 8, names: tuple[str, ...] = ()
) -> Forecast:
    """A plan of `layers` decoder layers on 1 x `ranks` shards; `names` go to the first matrices."""
    hardware = replace(named_hardware("h100"), ranks_per_node=max(1, min(8, ranks // 2)), measured=("products", "node"))
    tasks = dealt(ranks, groups, layers, names)
    shown = tuple(range(min(ranks, most_shown)))
    played = play(tasks, groups, shown, hardware)
    loads = loads_of(tasks, ranks)
    seconds = max(played.finish.values())
    buffers = max(moment.bytes for moment in played.memory)
    mean = sum(load.flops for load in loads) / ranks
    imbalance = max(load.flops for load in loads) / mean
    return Forecast(
        fingerprint="3f9a1c07e2b4d865",
        model=f"decoder-{layers}x4096",
        optimizer="Muon",
        matrices=len(tasks),
        elements=sum(math.prod(t.shape) for t in tasks),
        elementwise=2 * layers + 3,
        mesh=(("dp_shard", ranks),),
        hardware=hardware,
        options=(("strategy", "auto"), ("planner", "lpt-swap"), ("exchange", "forward"), ("numerics", "fast")),
        imbalance=imbalance,
        depth=2,
        collectives=2 * groups,
        templates=templates(tasks, hardware, ranks),
        tasks=tasks,
        groups=tuple(group_of(tasks, g, ranks) for g in range(groups)),
        loads=loads,
        memory=MemoryForecast(buffers, buffers * max(1, groups - 1), 5 << 30, 21 << 30),
        simulation=Simulation(
            seconds,
            summaries(loads, played, hardware, seconds, buffers),
            shown,
            tuple(played.spans),
            tuple(played.memory),
        ),
        alternatives=alternatives(seconds, imbalance, buffers, groups),
        assumptions=(
            "gradients are there when the step begins",
            "all ranks begin at the same time, and no other traffic is on the links",
            "kernels of the same shape take the same time on every rank",
        ),
    )


def nasty() -> Forecast:
    """One with names that no one should give."""
    found = forecast(names=NASTY)
    templates = (replace(found.templates[0], name=NASTY[0]), *found.templates[1:])
    return replace(found, model=NASTY[0], optimizer=NASTY[2], assumptions=NASTY, templates=templates)


def dealt(ranks: int, groups: int, layers: int, names: tuple[str, ...]) -> tuple[TaskForecast, ...]:
    """All matrices, the largest first, each to the rank with least work."""
    kinds = [(f"model.layers.{i}.{name}.weight", shape) for i in range(layers) for name, shape in SHAPES.items()]
    kinds.sort(key=lambda kind: -flops_of(kind[1]))
    load = [0] * ranks
    tasks = []
    for i, (name, shape) in enumerate(kinds):
        owner = load.index(min(load))
        load[owner] += flops_of(shape)
        group = i * groups // len(kinds)
        given = names[i] if i < len(names) else name
        template = template_name(shape)
        tasks.append(TaskForecast(given, shape, template, f"1x{ranks}", "owner", owner, group, flops_of(shape)))
    return tuple(tasks)


def template_name(shape: Shape) -> str:
    return f"muon_{'x'.join(map(str, shape))}_f32"


def flops_of(shape: Shape) -> int:
    small, large = sorted(shape)
    return 10 * small**3 + 20 * small**2 * large + 2 * small * large + 1


def compute_seconds(flops: float, hardware: Hardware) -> float:
    return flops / hardware.product_rate("bfloat16", 4096)


def play(tasks: tuple[TaskForecast, ...], groups: int, shown: tuple[int, ...], hardware: Hardware) -> Played:
    """Gathers ahead of the computation by one group, then scatters; collectives begin when all have come."""
    out = Played()
    by_group = [[t for t in tasks if t.group == g] for g in range(groups)]
    now = dict.fromkeys(shown, 0.0)
    held = dict.fromkeys(shown, 0)
    link = 0.0
    arrival = [0.0] * groups

    def work(act: str, group: int, rank: int, seconds: float, names: tuple[str, ...] = ()) -> None:
        out.spans.append(Span(rank, COMPUTE, act, group, now[rank], now[rank] + seconds, names))
        out.compute[rank] += seconds
        now[rank] += seconds

    def hold(rank: int, change: int) -> None:
        held[rank] += change
        out.memory.append(Memory(rank, now[rank], held[rank]))

    def transfer(act: str, group: int, flow: int) -> float:
        nonlocal link
        begin = max(link, *now.values()) if len(now) > 1 else max(link, now[shown[0]])
        size = 2 * sum(math.prod(t.shape) for t in by_group[group]) // len(shown)
        for rank in shown:
            end = begin + 2e-5 + size / hardware.network.bandwidth * (1 + 0.1 * (rank % 3))
            out.sent[rank] += size
            for stream in (NODE, NETWORK):
                out.spans.append(Span(rank, stream, act, group, begin, end, (), size, flow))
            link = max(link, end)
        return link

    def begin(group: int) -> None:
        size = 2 * sum(math.prod(t.shape) for t in by_group[group]) // len(shown)
        for rank in shown:
            hold(rank, 2 * size)
            work("prepare", group, rank, 1e-4)
        arrival[group] = transfer("start gather", group, 2 * group)

    begin(0)
    for group in range(groups):
        if group + 1 < groups:
            begin(group + 1)
        for rank in shown:
            now[rank] = max(now[rank], arrival[group])
            own = [t for t in by_group[group] if t.owner == rank]
            if own:
                work(
                    "compute",
                    group,
                    rank,
                    compute_seconds(sum(t.flops for t in own), hardware),
                    tuple(t.name for t in own),
                )
        over = transfer("start scatter", group, 2 * group + 1)
        if group == groups - 1:
            now.update(dict.fromkeys(shown, over))
        for rank in shown:
            work("apply", group, rank, 8e-5)
            hold(rank, -held[rank] if group == groups - 1 else -(held[rank] // 2))
    out.finish = dict(now)
    return out


def loads_of(tasks: tuple[TaskForecast, ...], ranks: int) -> tuple[LoadReport, ...]:
    by_rank: dict[int, dict[int, int]] = {rank: defaultdict(int) for rank in range(ranks)}
    counts = [0] * ranks
    for task in tasks:
        assert task.owner is not None
        by_rank[task.owner][task.group] += task.flops
        counts[task.owner] += 1
    return tuple(LoadReport(r, counts[r], sum(groups.values()), dict(groups)) for r, groups in by_rank.items())


def summaries(
    loads: tuple[LoadReport, ...], played: Played, hardware: Hardware, seconds: float, peak: int
) -> tuple[RankSummary, ...]:
    found = []
    for load in loads:
        compute = played.compute.get(load.rank, compute_seconds(load.flops, hardware))
        finish = played.finish.get(load.rank, seconds)
        exposed = max(0.0, finish - compute) * 0.7
        sent = played.sent.get(load.rank, 1 << 20)
        found.append(RankSummary(load.rank, compute, exposed, seconds - compute - exposed, finish, peak, sent))
    return tuple(found)


def templates(tasks: tuple[TaskForecast, ...], hardware: Hardware, ranks: int) -> tuple[TemplateForecast, ...]:
    found = []
    for shape in dict.fromkeys(t.shape for t in tasks):
        flops, elements = flops_of(shape), math.prod(shape)
        count = sum(t.shape == shape for t in tasks)
        each = compute_seconds(flops, hardware)
        move = 2 * elements / hardware.node.bandwidth
        rounds = math.ceil(count / ranks)
        chosen = StrategyForecast(
            "owner", rounds * each + 2 * move, rounds * each, move, move, True, True, "least predicted time"
        )
        other = (
            StrategyForecast(
                "replicated", count * each + move, count * each, move, 0.0, False, True, "every rank repeats the work"
            ),
            StrategyForecast(
                "batch-split",
                rounds * each * 1.02 + 2 * move,
                rounds * each * 1.02,
                move,
                move,
                False,
                True,
                "needs equal shapes in one stack",
            ),
        )
        found.append(
            TemplateForecast(
                template_name(shape),
                shape,
                count,
                FORMULAS[shape[0] <= shape[1]],
                "24*m*n + 10*Min(m, n)**2",
                "4*m*n",
                flops,
                24 * elements,
                4 * elements,
                each,
                ("momentum_buffer",) if shape[0] == 1024 else (),
                (chosen, *other),
            )
        )
    return tuple(found)


def group_of(tasks: tuple[TaskForecast, ...], index: int, ranks: int) -> GroupForecast:
    own = [t for t in tasks if t.group == index]
    work: dict[int | None, int] = defaultdict(int)
    for task in own:
        work[task.owner] += task.flops
    size = 2 * sum(math.prod(t.shape) for t in own) * (ranks - 1) // ranks
    return GroupForecast(index, 1, ranks, len(own), size, size, 0, max(work.values(), default=0))


def alternatives(seconds: float, imbalance: float, peak: int, groups: int) -> tuple[Alternative, ...]:
    return (
        Alternative(
            "lpt-swap",
            "owners and groups chosen together",
            imbalance,
            seconds,
            seconds / 9,
            3 << 30,
            peak,
            groups,
            True,
        ),
        Alternative(
            "alpha", "owners first, then groups", imbalance * 1.07, seconds * 1.12, seconds / 6, 3 << 30, peak, 4
        ),
        Alternative(
            "one group",
            "no micro-groups",
            imbalance,
            seconds * 1.31,
            seconds / 3,
            3 << 30,
            peak * max(1, groups - 1),
            1,
        ),
        Alternative(
            "every rank computes everything", "no owners", 1.0, seconds * 2.9, seconds / 12, 5 << 30, peak * 2, groups
        ),
    )


def ordered(found: Forecast) -> bool:
    """Does no stream of a rank do two things at once?"""
    lanes: dict[tuple[int, str], list[Span]] = defaultdict(list)
    for span in sorted(found.simulation.spans, key=lambda s: s.start):
        lanes[span.rank, span.stream].append(span)
    return all(a.end <= b.start + 1e-12 for own in lanes.values() for a, b in pairwise(own))
