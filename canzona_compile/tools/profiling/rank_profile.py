"""What one rank of `profile` does: it builds the user's model, wraps the optimizer, and measures some steps."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
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
ROUNDS = 20  # in which a rank asks the first one for its time; the fastest counts
HOW = "each rank asks rank 0 for its time, and takes the fastest of 20 answers as of half-way"


@dataclass(frozen=True, slots=True)
class RankTransfer:
    """An exchange that a rank takes part in.

    Attributes:
        sent: bytes that this rank sends to others.
    """

    team: tuple[int, ...]
    sent: int


@dataclass(frozen=True, slots=True)
class RankProfile:
    """What a rank did.

    Attributes:
        computed: of each step, the names of the matrices that it computes, by micro-group.
    """

    rank: int
    steps: tuple[MeasuredStep, ...]
    transfers: tuple[Mapping[tuple[int, str], RankTransfer], ...]
    computed: tuple[Mapping[int, tuple[str, ...]], ...]
    offset: ClockOffset
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
    offset = offset_to_first()
    return RankProfile(
        rank=rank,
        steps=found.own,
        transfers=tuple({} if step is None else transfers(step, rank) for step in found.steps),
        computed=tuple({} if step is None else computed(step, rank) for step in found.steps),
        offset=offset,
        report=optimizer.canzona.report() if rank == 0 else None,
        fingerprint=optimizer.canzona.plan().fingerprint,
    )


def transfers(step: Step, rank: int) -> dict[tuple[int, str], RankTransfer]:
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
            found[group.index, str(exchange.phase)] = RankTransfer(ranks, sent)
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


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """The clock of the first rank less that of this one.

    Attributes:
        bound: seconds by which it may be wrong: half the time that the answer took.
    """

    seconds: float
    bound: float


def offset_to_first() -> ClockOffset:
    """Compare the clock of this rank with that of rank 0, one rank after the other. A collective of all ranks."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    best = ClockOffset(0.0, 0.0 if rank == 0 else float("inf"))
    for other in range(1, ranks):
        dist.barrier()
        for _ in range(ROUNDS if rank in (0, other) else 0):
            if rank == 0:
                asked = torch.zeros(1, dtype=torch.float64, device="cpu")
                dist.recv(asked, other)
                dist.send(torch.tensor([time.perf_counter()], dtype=torch.float64, device="cpu"), other)
                continue
            answer = torch.zeros(1, dtype=torch.float64, device="cpu")
            begin = time.perf_counter()
            dist.send(torch.zeros(1, dtype=torch.float64, device="cpu"), 0)
            dist.recv(answer, 0)
            end = time.perf_counter()
            if (end - begin) / 2 < best.bound:
                best = ClockOffset(float(answer) - (begin + end) / 2, (end - begin) / 2)
    return best
