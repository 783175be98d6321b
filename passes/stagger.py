"""Offsets of periodic work: they spread refreshes over steps, so that not all matrices refresh on the same step.

A matrix that is `ahead` by some number of steps decides about periodic work as if its counters were larger by that
number: a refresh is due if (step + ahead) % every == 0. Everything else that it computes from its counters, such as
bias corrections, does not change.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import lcm

import torch
from torch import Tensor

from canzona_compile.analysis.step_time import rates_of
from canzona_compile.ir.layout import Ranks
from canzona_compile.ir.step import Step, Task
from canzona_compile.ir.variant_period import VariantPeriod

MOST_PHASES = 16  # per period; every step on which some matrix refreshes needs a program of its own
LONGEST = 256  # the most steps of a profile; a longer common period is cut off there

VariantPeriods = Mapping[str, VariantPeriod]  # by task
Profile = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Stagger:
    """Offsets, and their predicted effect.

    Attributes:
        ahead: by task, the number of steps by which its periodic work comes earlier. Tasks without periodic work
            are left out.
        together: the seconds that the busiest rank is predicted to compute on each step of a period if all offsets
            are zero. Empty if no work is periodic.
    """

    ahead: Mapping[str, int]
    together: Profile
    apart: Profile


def stagger(owned: Step, variant_periods: VariantPeriods) -> Stagger:
    """Choose an offset for every task with periodic work.

    What each set of ranks shares, and what this rank computes alone, are spread each by itself. Other ranks do not know
    all of what this one shares with others, so that may not decide; and where they hold copies, they must choose alike.

    Args:
        owned: the owned step.
    """
    periodic = {t.name for t in owned.tasks if t.name in variant_periods and variant_periods[t.name].periodic}
    if not periodic:
        return Stagger({}, (), ())
    horizon = min(LONGEST, lcm(*(len(variant_periods[name].period) for name in periodic)))
    cost = {t.name: cost_by_step(owned, t, variant_periods.get(t.name), horizon) for t in owned.tasks}
    periods = {name: len(variant_periods[name].period) for name in periodic}
    ahead: dict[str, int] = {}
    sharing: dict[Ranks, list[Task]] = {}
    for task in owned.tasks:
        sharing.setdefault(task.layout.grid.members() if task.layout.grid.size > 1 else (), []).append(task)
    for tasks in sharing.values():
        ahead |= offsets(tasks, cost, periods)
    rate = rates_of(owned.machine).flops
    loads = loads_of(owned.tasks, cost, {}), loads_of(owned.tasks, cost, ahead)
    return Stagger(ahead, *(tuple((busiest(load, load) / rate).tolist()) for load in loads))


def offsets(tasks: Sequence[Task], cost: Mapping[str, Tensor], periods: Mapping[str, int]) -> dict[str, int]:
    """Choose offsets that spread some tasks, the heaviest periodic work first.

    Each task takes the offset for which the busiest step of its owner rank stays cheapest. Ties go to the smaller sum
    of squares and then to the smaller offset, so that owners with equal work refresh on the same steps and no rank
    waits for another.

    Args:
        cost: by task, its FLOPs on every step of a profile.
        periods: the steps after which the work of a task repeats itself; tasks without periodic work are left out.
    """
    moving = [t for t in tasks if t.name in periods]
    nothing = {name: torch.zeros_like(cost[name]) for name in periods}
    load = loads_of(tasks, {**cost, **nothing}, {})
    ahead: dict[str, int] = {}
    for task in sorted(moving, key=lambda t: (float(cost[t.name].min() - cost[t.name].max()), t.index)):
        period, own = periods[task.name], cost[task.name]
        shifts = sorted({i * period // min(period, MOST_PHASES) for i in range(period)})
        sums = busiest(load, task.ranks) + torch.stack([own.roll(-shift) for shift in shifts])
        worst, squares = sums.amax(1).tolist(), sums.square().sum(1).tolist()
        ahead[task.name] = shifts[min(range(len(shifts)), key=lambda i: (worst[i], squares[i], i))]
        for rank in task.ranks:
            load[rank] = load[rank] + own.roll(-ahead[task.name])
    return ahead


def loads_of(tasks: Iterable[Task], cost: Mapping[str, Tensor], ahead: Mapping[str, int]) -> dict[int, Tensor]:
    """Return by rank the FLOPs that it computes on every step of a profile.

    Args:
        cost: by task, its FLOPs on every step.
        ahead: by task, the steps by which its periodic work comes earlier; 0 if it is left out.
    """
    load: dict[int, Tensor] = {}
    for task in tasks:
        own = cost[task.name].roll(-ahead.get(task.name, 0))
        for rank in task.ranks:
            load[rank] = load[rank] + own if rank in load else own
    return load


def cost_by_step(owned: Step, task: Task, variant_period: VariantPeriod | None, horizon: int) -> Tensor:
    """Return the FLOPs of a task on every step of a profile.

    Args:
        owned: the owned step.
        variant_period: how its code continues from step to step; None if it does the same on every step.

    Returns:
        A float64 tensor of shape [horizon].
    """
    placed = owned.placed_of(task)
    if variant_period is None:
        return torch.full((horizon,), float(placed.flops), dtype=torch.float64, device="cpu")
    flops = {p.template.name: float(p.flops) for p in owned.variants()[placed]}
    steps = [flops[variant_period.period[i % len(variant_period.period)]] for i in range(horizon)]
    return torch.tensor(steps, dtype=torch.float64, device="cpu")


def busiest(load: Mapping[int, Tensor], ranks: Iterable[int]) -> Tensor:
    """Return the load of the busiest of some ranks on each step, of shape [steps], in FLOPs."""
    return torch.stack([load[rank] for rank in ranks]).amax(0)
