"""`profile`: real steps of a wrapped optimizer on gloo ranks of this machine, measured."""

from __future__ import annotations

import json
import logging
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from canzona_compile.compat.telling import shown
from canzona_compile.errors import CanzonaError
from canzona_compile.machine.hardware import hardware_of
from canzona_compile.report.build import Report
from canzona_compile.tools.output import check_output, show, write
from canzona_compile.tools.processes import run_ranks
from canzona_compile.tools.profiling.rank_profile import RankProfile, run_profiled
from canzona_compile.tools.profiling.real_trace import real_trace
from canzona_compile.tools.verification.check import add_run_arguments, check_arguments, run_arguments
from canzona_compile.tools.verification.layouts import LayoutName
from canzona_compile.tools.verification.user_model import Build, name_of, packed
from canzona_compile.tools.verification.workers import Order

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
