"""What matrices alike would take by each strategy, in closed form: the numbers that decide."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from canzona_compile.analysis.roofline import PlacedTime
from canzona_compile.ir.hardware import Hardware, Link
from canzona_compile.ir.layout import Grid, Layout
from canzona_compile.ir.step import Placed, Strategy, Task
from canzona_compile.tools.planning.figures import StrategyForecast
from canzona_compile.tools.planning.gram import BATCH_SPLIT, GRAM, ROUNDS, gram_of


@dataclass(frozen=True, slots=True)
class Setting:
    """Where the matrices of a template lie, and which link their exchanges need."""

    grid: Grid
    tasks: int
    link: Link
    hardware: Hardware

    def transfer(self, busiest: float) -> float:
        return busiest / self.link.bandwidth + self.link.latency + self.link.per_peer * (self.grid.shards - 1)


def strategies(
    placed: Placed, time: PlacedTime, tasks: Sequence[Task], by_gram: Collection[str], hardware: Hardware, zero1: bool
) -> tuple[StrategyForecast, ...]:
    """All strategies for `tasks`, which share a cut and a grid; `by_gram` are the cuts that take that one.

    Args:
        zero1: replicas do not exchange updates in the step.
    """
    grid = tasks[0].layout.grid
    at = Setting(grid, len(tasks), hardware.link(grid.ranks[0]), hardware)
    taken = {GRAM} if placed.name in by_gram else {str(t.strategy) for t in tasks}
    layout = tasks[0].layout
    found = [
        owner(at, time, zero1),
        replicated(at, time),
        split_stack(at, placed, time),
        gram(at, placed, layout, zero1),
    ]
    return tuple(
        StrategyForecast(name, sum(parts), *parts, name in taken, name in set(Strategy), note)
        for name, parts, note in found
    )


Parts = tuple[float, float, float]
IMPOSSIBLE: Parts = (math.inf, 0.0, 0.0)


def owner(at: Setting, time: PlacedTime, zero1: bool) -> tuple[str, Parts, str]:
    most = math.ceil(at.tasks / at.grid.size)
    compute = most * time.compute.total(at.hardware)
    if at.grid.size == 1:
        return Strategy.OWNER, (compute, 0.0, 0.0), "one rank"
    sharded, replicas = at.grid.shards > 1, at.grid.replicas
    gather = at.transfer(most * time.gathered) if sharded else 0.0
    scatter = at.transfer(most * time.scattered) if sharded else 0.0
    if replicas > 1 and not zero1:
        between = at.hardware.link(tuple(row[0] for row in at.grid.ranks))
        received = at.tasks * time.scattered / at.grid.shards * (1 - 1 / replicas)
        scatter += received / between.bandwidth + between.latency
    return Strategy.OWNER, (compute, gather, scatter), f"{most} on the busiest of {at.grid.size} ranks"


def replicated(at: Setting, time: PlacedTime) -> tuple[str, Parts, str]:
    compute = at.tasks * time.compute.total(at.hardware)
    gather = at.transfer(at.tasks * time.gathered) if at.grid.shards > 1 else 0.0
    return Strategy.REPLICATED, (compute, gather, 0.0), "every rank computes all"


def split_stack(at: Setting, placed: Placed, time: PlacedTime) -> tuple[str, Parts, str]:
    shape = placed.template.shape
    if len(shape) < 3:
        return BATCH_SPLIT, IMPOSSIBLE, "no stack"
    entries = at.tasks * shape[0]
    most = math.ceil(entries / at.grid.size)
    share = most / shape[0]
    gather = at.transfer(share * time.gathered) if at.grid.shards > 1 else 0.0
    scatter = at.transfer(share * time.scattered) if at.grid.shards > 1 else 0.0
    parts = (share * time.compute.total(at.hardware), gather, scatter)
    return BATCH_SPLIT, parts, f"{most} entries on the busiest of {at.grid.size} ranks"


def gram(at: Setting, placed: Placed, layout: Layout, zero1: bool) -> tuple[str, Parts, str]:
    if at.grid.shards == 1:
        return GRAM, IMPOSSIBLE, "not sharded"
    if at.grid.replicas > 1 and not zero1:
        return GRAM, IMPOSSIBLE, "replicas that all apply updates"
    form = gram_of(placed, layout, at.hardware)
    if form is None:
        return GRAM, IMPOSSIBLE, "no iteration X <- p(X X^T) X, or cut along its short dim"
    most = math.ceil(at.tasks / at.grid.size)
    rows = at.tasks / at.grid.replicas
    compute = ROUNDS * (2 * rows * form.fragment + most * form.owner)
    # A rank sends a partial matrix for every task of its replica, and gets a factor for each.
    sent = ROUNDS * at.transfer(rows * form.up)
    back = ROUNDS * at.transfer(rows * form.down)
    return GRAM, (compute, sent, back), f"{ROUNDS} rounds, float16; needs numerics fast"
