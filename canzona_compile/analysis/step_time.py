"""Predict how long a step takes on its busiest rank, as work on one processor and bytes on one link.

This completes the first of the two models of time (see `analysis.roofline`). The passes decide by it: which tasks every
rank computes, how many micro-groups there are. Nobody else does: it has to be right in comparisons, not in seconds.
Only the busiest rank counts, an owner of a group computes its FLOPs at one rate, and elementwise work takes no time
beside its launches.
What single ranks do, and how they wait for one another, is the question of the second model, `simulation`, whose
seconds the report shows.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

from canzona_compile.analysis.flops import bytes_of_wires
from canzona_compile.analysis.lanes import BatchTime, batch_time, divided, saved
from canzona_compile.analysis.roofline import TYPICAL, GraphTime, graph_time
from canzona_compile.ir.layout import Grid
from canzona_compile.ir.step import Placed, Task
from canzona_compile.machine.hardware import Hardware, Machine, hardware_of

N = TypeVar("N", int, float)


@dataclass(frozen=True, slots=True)
class Rates:
    """What a machine does per second, in short. Only ratios between plans matter.

    Attributes:
        flops: FLOPs per second of matrix products, per rank.
        wire: bytes per second that a rank sends in an all-to-all.
        latency: seconds that a collective costs however small it is.
        overlap: the share of communication that runs beside computation: all of it with NCCL on its own stream.
        here: see `Hardware.here`.
    """

    flops: float
    wire: float
    latency: float
    overlap: float
    here: bool = False

    def sent(self, ranks: int) -> float:
        """The share of whole matrices that their owner sends to so many ranks, itself among them.

        Assumed rates are only compared with one another, and count all of it.
        """
        return 1.0 - 1.0 / ranks if self.here else 1.0

    def copied(self, ranks: int) -> float:
        """How many times an owner sends what each of so many ranks gets, itself among them."""
        return ranks - 1.0 if self.here else 1.0


@cache
def rates_of(machine: Machine, ranks: tuple[int, ...] = ()) -> Rates:
    """The rates of a machine in short, with the slowest link among `ranks`."""
    hardware = hardware_of(machine)
    link = hardware.link(ranks or (0,))
    threads = 1 if hardware.here else machine.threads  # whose products used all threads
    flops = hardware.product_rate("bfloat16", TYPICAL) * threads
    return Rates(flops, link.bandwidth, link.latency, hardware.overlap, hardware.here)


def task_seconds(placed: Placed, machine: Machine, ranks: tuple[int, ...]) -> float:
    """Seconds that one matrix takes by itself: arithmetic, and launches, which are all there is to small ones."""
    hardware, rates = hardware_of(machine), rates_of(machine, ranks)
    time = graph_time(placed.compute, hardware, placed.kind.matrices)
    if hardware.here:
        return time.total(hardware)
    return placed.flops / rates.flops + time.launches(hardware)


# -- what a micro-group asks of its ranks ------------------------------------------------------


TaskWork = tuple[int, int, int]  # what a task costs the rank that computes it: FLOPs, bytes received and bytes sent


def weights(tasks: Sequence[Task], placed: Mapping[str, Placed]) -> dict[str, TaskWork]:
    """The weights of tasks, by name of a cut."""
    cuts = (placed[name] for name in {task.placed for task in tasks})
    return {p.name: (p.flops, bytes_of_wires(p.gather), bytes_of_wires(p.scatter)) for p in cuts}


class GridLoad:
    """The summed cost of tasks for the ranks of their grid.

    Attributes:
        flops, up, down: FLOPs, bytes gathered and bytes scattered, by owner rank. The key None is for tasks that every
            rank computes.
    """

    def __init__(self, known: Mapping[str, TaskWork]) -> None:
        self.known = known
        self.flops: dict[object, int] = {None: 0}
        self.up: dict[object, int] = {None: 0}
        self.down: dict[object, int] = {None: 0}

    def add(self, owner: object, cut: str, count: int = 1) -> None:
        """Add tasks of one owner and cut."""
        flops, up, down = self.known[cut]
        self.flops[owner] = self.flops.get(owner, 0) + count * flops
        self.up[owner] = self.up.get(owner, 0) + count * up
        self.down[owner] = self.down.get(owner, 0) + count * down

    def with_(self, task: Task) -> tuple[int, int]:
        """FLOPs and bytes gathered of the busiest rank that computes `task`, if `task` is added."""
        (flops, up, _), owner = self.known[task.placed], task.owner
        if owner is None:
            return busiest(self.flops) + flops, busiest(self.up) + up
        return self.flops.get(owner, 0) + self.flops[None] + flops, self.up.get(owner, 0) + self.up[None] + up


def busiest(by_owner: Mapping[object, N]) -> N:
    """The amount of the busiest rank: the largest amount of an owner, plus the amount that every rank has."""
    return max((n for owner, n in by_owner.items() if owner is not None), default=0) + by_owner[None]


def load_by_owner(tasks: Sequence[Task], placed: Mapping[str, Placed]) -> GridLoad:
    """The load of tasks of one grid."""
    load = GridLoad(weights(tasks, placed))
    for (owner, cut), count in Counter((task.owner, task.placed) for task in tasks).items():
        load.add(owner, cut, count)
    return load


@dataclass(frozen=True, slots=True)
class GroupLoad:
    """A micro-group as the pipeline sees it.

    Attributes:
        gather_bytes: bytes that the busiest rank gathers.
        compute_flops: FLOPs of the busiest owner.
        scatter_bytes: bytes that the busiest rank scatters, and exchanges between replicas.
        beside: seconds that the busiest owner takes beside its FLOPs, see `seconds_beside`.
    """

    gather_bytes: float
    compute_flops: float
    scatter_bytes: float
    collectives: int
    beside: float = 0.0


@dataclass(frozen=True, slots=True)
class SharedLaunches:
    """What all tasks of one micro-group, cut and param group share: launches, and what a stack saves.

    Attributes:
        fragments: seconds of launches on fragments.
        compute: what an owner does with a whole matrix.
        flops: of that, as the load of owners counts them.
        stacks: whether an owner's matrices are computed as a stack.
        aside: whether batches may compute side by side.
    """

    fragments: float
    compute: GraphTime
    flops: int
    hardware: Hardware
    stacks: bool
    aside: bool = False

    @property
    def matrices(self) -> float:
        """Seconds of an owner's launches; 0 if it launches everything once for each of its matrices."""
        return self.compute.launches(self.hardware) if self.stacks else 0.0

    def uneven(self, count: int, rates: Rates) -> float:
        """Seconds that the products of `count` matrices take more than at the one rate of `rates`.

        Small ones leave processors idle, unless enough of them are one stack. 0 on CPU, unless its rates were measured.

        Args:
            count: how many matrices alike an owner has in one micro-group.
            rates: those with which their FLOPs are counted.
        """
        if self.hardware.device == "cpu":
            return count * (self.compute.seconds - self.flops / rates.flops) if self.hardware.here else 0.0
        each = sum(work.seconds - work.flops / rates.flops for work in self.compute.works)
        return count * (each - (self.compute.saves(count, self.hardware) if self.stacks else 0.0))


def shared_launches(placed: Placed, machine: Machine, stacks: bool, aside: bool = False) -> SharedLaunches:
    """The launches of a cut that do not grow with the number of its tasks."""
    hardware = hardware_of(machine)
    graphs = (placed.prepare, placed.compute, placed.apply)
    prepare, compute, apply = (graph_time(g, hardware, placed.kind.matrices) for g in graphs)
    launches = prepare.launches(hardware) + apply.launches(hardware)
    return SharedLaunches(launches, compute, placed.flops, hardware, stacks, aside and hardware.device != "cpu")


def seconds_beside(tasks: Sequence[Task], shared: Mapping[str, SharedLaunches], rates: Rates) -> float:
    """Seconds that tasks of one micro-group take beside their FLOPs: of launches, and of products that take more."""
    launches, products = defaultdict[object, float](float), defaultdict[object, float](float)
    counts = Counter((task.owner, task.placed, task.param_group) for task in tasks)
    alike = {(cut, n) for (_, cut, _), n in counts.items()}
    uneven = {(cut, n): shared[cut].uneven(n, rates) for cut, n in alike}
    hardware = next(iter(shared.values())).hardware
    alone = {(cut, n): batch_time(shared[cut].compute, n, shared[cut].stacks, hardware) for cut, n in alike}
    batches = defaultdict[object, list[BatchTime]](list)
    for (owner, cut, _), count in counts.items():
        launches[owner] += shared[cut].matrices
        products[owner] += uneven[cut, count]
        if shared[cut].aside:
            batches[owner].append(alone[cut, count])
    for one, times in batches.items():
        products[one] -= saved(times, divided(times, hardware), hardware)
    fragments = sum(shared[cut].fragments for cut, _ in {(cut, group) for _, cut, group in counts})
    return fragments + sum(busiest({None: 0.0, **by_owner}) for by_owner in (launches, products))


def load_of(
    tasks: Sequence[Task],
    grid: Grid,
    placed: Mapping[str, Placed],
    shared: Mapping[str, SharedLaunches] | None = None,
    rates: Rates | None = None,
) -> GroupLoad:
    """The load of one micro-group.

    Args:
        shared: what tasks alike launch once, by cut; None if FLOPs alone count.
    """
    load = load_by_owner(tasks, placed)
    sharded, exchanged = grid.shards > 1, grid.replicas > 1
    crossing = 1.0 if rates is None else rates.sent(grid.shards)
    copies = 1.0 if rates is None else rates.copied(grid.replicas)
    owned = len(load.flops) > 1
    down = max((n for owner, n in load.down.items() if owner is not None), default=0)
    return GroupLoad(
        gather_bytes=busiest(load.up) * sharded * crossing,
        compute_flops=float(busiest(load.flops)),
        scatter_bytes=down * (sharded * crossing + exchanged * copies / grid.shards),
        collectives=sharded + owned * (sharded + exchanged),
        beside=0.0 if shared is None or rates is None else seconds_beside(tasks, shared, rates),
    )


def pipeline_seconds(groups: Sequence[GroupLoad], rates: Rates, depth: int) -> float:
    """Predict the time of a step that is not scheduled yet.

    With overlap the link gathers ahead while the processor computes; without it everything adds up. A share of overlap
    gives the same share of what that saves.
    """
    times: list[tuple[float, float, float]] = []
    for g in groups:
        halves = max(1, g.collectives)
        up = g.gather_bytes / rates.wire + rates.latency * (halves - halves // 2) * (g.gather_bytes > 0)
        down = g.scatter_bytes / rates.wire + rates.latency * max(1, halves // 2) * (g.scatter_bytes > 0)
        times.append((up, g.compute_flops / rates.flops + g.beside, down))
    one_by_one = float(sum(map(sum, times)))
    if not rates.overlap or depth == 1:
        return one_by_one
    processor = link = 0.0  # seconds from the begin of the step until which each is busy, with one thing at a time
    computed: list[float] = []
    for i, (up, work, _) in enumerate(times):
        if i >= depth:  # it reuses the buffers of micro-group i - depth, which must be scattered first
            link = max(link, computed[i - depth]) + times[i - depth][2]
        link += up
        processor = max(processor, link) + work
        computed.append(processor)
    for i in range(max(0, len(times) - depth), len(times)):
        link = max(link, computed[i]) + times[i][2]
    return rates.overlap * link + (1.0 - rates.overlap) * one_by_one
