"""What one rank of `profile` does: it builds the user's model, wraps the optimizer, and measures some steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch.distributed as dist

from canzona_compile.compat.telling import tell
from canzona_compile.errors import CanzonaError
from canzona_compile.ir.step import Phase, Step
from canzona_compile.report.build import Report
from canzona_compile.runtime.step_clock import MeasuredStep
from canzona_compile.session.measuring import both_measured
from canzona_compile.simulation.simulate import teams
from canzona_compile.tools.verification.layouts import give, share
from canzona_compile.tools.verification.user_model import blamed, built, random_gradients
from canzona_compile.tools.verification.workers import Order, by_names_of_the_model

# Steps: the first is eager, the second is the first one of its program. As many more follow as are measured.
WARM_UP = 3


Transfer = tuple[tuple[int, ...], int]  # an exchange: the ranks that take part, and the bytes that this one sends


@dataclass(frozen=True, slots=True)
class RankProfile:
    """What a rank did.

    Attributes:
        computed: of each step, the names of the matrices that it computes, by micro-group.
    """

    rank: int
    steps: tuple[MeasuredStep, ...]
    transfers: tuple[Mapping[tuple[int, str], Transfer], ...]
    computed: tuple[Mapping[int, tuple[str, ...]], ...]
    report: Report | None
    fingerprint: str


def run_profiled(rank: int, order: Order) -> RankProfile:
    """Measure some steps on this rank."""
    made = built(order.build, order.seed)
    share(made, order.layout, order.options)
    optimizer: Any = made.optimizer
    grads = random_gradients(made, order.seed)
    before = WARM_UP + order.steps  # so that programs for work that is periodic are there
    for number in range(before + order.steps):
        if number == before:
            optimizer.canzona.measure(order.steps)
        with blamed(f"step {number + 1}"), by_names_of_the_model(made):
            give(made, order.layout, grads)
            dist.barrier()  # as after a backward pass whose gradients were averaged
            optimizer.step()
        if rank == 0:
            tell(f"step {number + 1} of {before + order.steps}", number + 1, before + order.steps)
    found = reduce(both_measured, [session.measuring.found for session in optimizer.canzona.sessions])
    if found is None:
        raise CanzonaError(
            "the last step made a new plan, so no step of the old plan is left to show", hint="measure more steps"
        )
    return RankProfile(
        rank=rank,
        steps=found.own,
        transfers=tuple({} if step is None else transfers(step, rank) for step in found.steps),
        computed=tuple({} if step is None else computed(step, rank) for step in found.steps),
        report=optimizer.canzona.report() if rank == 0 else None,
        fingerprint=optimizer.canzona.plan().fingerprint,
    )


def transfers(step: Step, rank: int) -> dict[tuple[int, str], Transfer]:
    """Find the exchanges of a step that a rank takes part in, by micro-group and phase."""
    found = {}
    for group in step.micro_groups:
        grid = step.grid_of(group)
        if rank not in grid.members():
            continue
        at = grid.find(rank)
        for exchange in group.exchanges:
            team = next(team for team in teams(grid, Phase(exchange.phase)) if at in team)
            sent = sum(exchange.block(at, other)[1] for other in team if other != at)
            ranks = tuple(grid.ranks[r][s] for r, s in team)
            found[group.index, str(exchange.phase)] = ranks, sent
    return found


def computed(step: Step, rank: int) -> dict[int, tuple[str, ...]]:
    """Name the matrices that a rank computes, by micro-group."""
    found = {}
    for group in step.micro_groups:
        tasks = [step.task(name) for name in group.tasks]
        grid = tasks[0].layout.grid
        if rank in grid.members():
            found[group.index] = tuple(t.name for t in tasks if t.owner in (None, grid.find(rank)))
    return found
