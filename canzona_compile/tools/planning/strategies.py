"""Predicts in closed form how long the matrices of one template take by each strategy.

The compute graph gives the seconds of computing (`analysis.roofline`), and the bytes of its busiest rank give the
seconds of an exchange. The ranks do nothing else, and nothing overlaps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from canzona_compile.analysis.roofline import PlacedTime, exchange_seconds
from canzona_compile.ir.layout import Grid
from canzona_compile.ir.step import Strategy, Task
from canzona_compile.machine.hardware import Hardware, Link
from canzona_compile.tools.planning.figures import StrategyForecast


@dataclass(frozen=True, slots=True)
class Setting:
    """The grid of a template's matrices, and the link that their exchanges use."""

    grid: Grid
    tasks: int
    link: Link
    hardware: Hardware

    def transfer(self, busiest: float) -> float:
        """Return the seconds of an exchange within a replica whose busiest rank moves this many bytes."""
        return exchange_seconds(self.link, busiest, self.grid.shards)


def strategies(
    time: PlacedTime, tasks: Sequence[Task], hardware: Hardware, zero1: bool
) -> tuple[StrategyForecast, ...]:
    """Predict every strategy for tasks that share a cut and a grid.

    Args:
        time: the predicted time of the cut for one whole matrix.
        tasks: at least one.
        hardware: the rates.
        zero1: whether replicas leave the exchange of updates to the next forward pass.

    Returns:
        A forecast for each strategy, in seconds for all of the tasks.
    """
    grid = tasks[0].layout.grid
    at = Setting(grid, len(tasks), hardware.link(grid.ranks[0]), hardware)
    taken = {task.strategy for task in tasks}
    return tuple(
        StrategyForecast(str(strategy), sum(parts), *parts, strategy in taken, True, note)
        for strategy, parts, note in (owner(at, time, zero1), replicated(at, time))
    )


Parts = tuple[float, float, float]  # seconds of compute, gather and scatter


def owner(at: Setting, time: PlacedTime, zero1: bool) -> tuple[Strategy, Parts, str]:
    """Every matrix has one owner, and no rank owns more than its even share, rounded up."""
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


def replicated(at: Setting, time: PlacedTime) -> tuple[Strategy, Parts, str]:
    """Every rank gathers and computes every matrix."""
    compute = at.tasks * time.compute.total(at.hardware)
    gather = at.transfer(at.tasks * time.gathered) if at.grid.shards > 1 else 0.0
    return Strategy.REPLICATED, (compute, gather, 0.0), "every rank computes all"
