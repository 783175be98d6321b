"""`python -m canzona_compile profile module:function`."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from canzona_compile.compat.telling import shown
from canzona_compile.tools.output import show
from canzona_compile.tools.profiling.profile import profile
from canzona_compile.tools.verification.command import add_run_arguments, run_arguments


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
