"""Predicts in closed form how long the matrices of one template take by each strategy.

The compute graph gives the seconds of computing (`analysis.roofline`), and the bytes of its busiest rank give the
seconds of an exchange. The ranks do nothing else, and nothing overlaps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from canzona_compile.analysis.roofline import PlacedTime, exchange_seconds
from canzona_compile.ir.step import Strategy, Task
from canzona_compile.machine.hardware import Hardware
from canzona_compile.tools.planning.figures import StrategyForecast


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
        StrategyForecast(str(strategy), sum(parts), *parts, strategy in taken, True, note)
        for strategy, parts, note in (
            (Strategy.OWNER, (most * compute, transfer(most * time.gathered), scatter), share),
            (Strategy.REPLICATED, (count * compute, transfer(count * time.gathered), 0.0), "every rank computes all"),
        )
    )
