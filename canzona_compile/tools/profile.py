"""`profile`: real steps of a wrapped optimizer on gloo ranks of this machine, measured."""

from __future__ import annotations

import json
import logging
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

import torch.distributed as dist

from canzona_compile.compat.telling import shown, tell
from canzona_compile.errors import CanzonaError
from canzona_compile.ir.step import Phase, Step
from canzona_compile.machine.hardware import Hardware, hardware_of
from canzona_compile.report.build import Report
from canzona_compile.runtime.step_clock import MeasuredStep
from canzona_compile.session.measuring import both_measured
from canzona_compile.simulation.engine import COMPUTE, NODE, Simulation, Span
from canzona_compile.simulation.simulate import teams
from canzona_compile.tools.output import check_output, show, write
from canzona_compile.tools.planning.trace import written
from canzona_compile.tools.processes import run_ranks
from canzona_compile.tools.verification.check import add_run_arguments, check_arguments, run_arguments
from canzona_compile.tools.verification.layouts import LayoutName, give, share
from canzona_compile.tools.verification.user_model import Build, blamed, built, name_of, packed, random_gradients
from canzona_compile.tools.verification.workers import Order, by_names_of_the_model

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepProfile:
    """What `profile` found.

    Attributes:
        report: of rank 0, with the measured phases of all ranks.
    """

    report: Report
    ranks: tuple[RankProfile, ...]


def profile(
    build: Build | str,
    *,
    steps: int = 5,
    ranks: int = 2,
    layout: LayoutName = "fsdp",
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
    trace: str | Path | None = None,
    limit: float = 600.0,
) -> StepProfile:
    """Take real steps with random gradients on gloo ranks of one thread, and measure their phases.

    Args:
        build: returns (model, optimizer), as for `verify`; a loss is not used. A text "module:function" names one that
            only the processes import.
        limit: seconds until the processes are ended.
    """
    options = dict(options or {})
    if steps < 1:
        raise CanzonaError(f"steps={steps} measures nothing", hint="5 steps are enough")
    check_arguments(max(2, steps), ranks, layout, limit, options)
    check_output(trace, "trace")
    log.info("profile %s: %d ranks, %d steps", name_of(build), ranks, steps)
    order = Order(packed(build), steps, layout, seed, options)
    outcomes: list[RankProfile] = run_ranks(ranks, run_profiled, (order,), limit)
    report = outcomes[0].report
    assert report is not None
    found = StepProfile(report, tuple(outcomes))
    if trace is not None:
        made = real_trace(found.ranks, name_of(build), report.optimizer, hardware_of(report.machine))
        write(json.dumps(made), trace, "trace")
        log.info("%s: a trace of %d ranks; open it with ui.perfetto.dev", trace, ranks)
    return found


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of `profile` to its parser."""
    add = parser.add_argument
    add("build", metavar="module:function", help="function that returns (model, optimizer) on the CPU, as for verify")
    add("--steps", type=int, default=5, help="number of steps to measure (%(default)s)")
    add("--trace", metavar="FILE", help="write a trace of all ranks for ui.perfetto.dev")
    add("--json", action="store_true", help="print the report as JSON")
    add_run_arguments(parser)


def run(given: Namespace) -> int:
    """Measure, print the report, and return the exit code, which is 0."""
    with shown("profile", quiet=given.quiet):
        found = profile(given.build, steps=given.steps, trace=given.trace, **run_arguments(given))
    show(found.report, found.report.to_json if given.json else None)
    return 0


# -- on a rank ------------------------------------------------------------------------------------


# Steps: the first is eager, the second is the first one of its program. As many more follow as are measured.
WARM_UP = 3


RankTransfer = tuple[tuple[int, ...], int]  # an exchange: the ranks that take part, and the bytes that this one sends


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


# -- the trace ------------------------------------------------------------------------------------


START, WAIT = "start ", "wait "


def real_trace(profiles: Sequence[RankProfile], model: str, optimizer: str, hardware: Hardware) -> dict[str, Any]:
    """Return the measured steps as the object form of a trace: `json.dump` it to a file."""
    flows: dict[tuple[Any, ...], int] = {}
    found = [span for own in profiles for span in spans_of(own, flows)]
    begin = min((span.start for span in found), default=0.0)
    moved = [replace(span, start=span.start - begin, end=span.end - begin) for span in found]
    seconds = max((span.end for span in moved), default=0.0)
    ranks = tuple(sorted(own.rank for own in profiles))
    return written(
        Simulation(seconds, (), ranks, tuple(sorted(moved, key=lambda s: (s.rank, s.start, s.stream))), ()),
        hardware,
        {
            "fingerprint": profiles[0].fingerprint,
            "model": model,
            "optimizer": optimizer,
            "ranks": len(ranks),
        },
    )


def spans_of(profile: RankProfile, flows: dict[tuple[Any, ...], int]) -> Iterator[Span]:
    """Yield what a rank did, and below it its collectives."""
    rank = profile.rank
    for number, step in enumerate(profile.steps):
        begun: dict[tuple[int, str], float] = {}
        for own in step.spans:
            names = profile.computed[number].get(own.group, ()) if own.act == "compute" else ()
            yield Span(rank, COMPUTE, own.act.replace(START, "begin "), own.group, own.start, own.end, names)
            phase = own.act.removeprefix(START).removeprefix(WAIT)
            transfer = profile.transfers[number].get((own.group, phase))
            if transfer is None:
                continue
            if own.act.startswith(START):
                begun[own.group, phase] = own.start
            elif (own.group, phase) in begun:
                team, sent = transfer
                flow = flows.setdefault((number, own.group, phase, team), len(flows))
                first = begun.pop((own.group, phase))
                yield Span(rank, NODE, f"{START}{phase}", own.group, first, own.end, (), sent, flow)
