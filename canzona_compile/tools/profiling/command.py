"""`python -m canzona_compile profile module:function`."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from typing import get_args

from rich.console import Console

from canzona_compile.tools.profiling.profile import profile
from canzona_compile.tools.verification.check import OPTIONS
from canzona_compile.tools.verification.command import add_options_of_wrap
from canzona_compile.tools.verification.layouts import LayoutName


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of `profile` to its parser."""
    add = parser.add_argument
    add("build", metavar="module:function", help="returns (model, optimizer), on the CPU, as for verify")
    add("--steps", type=int, default=5, help="to measure (%(default)s)")
    add("--ranks", type=int, default=2, help="gloo processes (%(default)s)")
    add("--layout", choices=get_args(LayoutName), default="fsdp", help="of the parameters (%(default)s)")
    add("--seed", type=int, default=0, help="of build and of random gradients (%(default)s)")
    add("--limit", type=float, default=600.0, metavar="SECONDS", help="until the processes are ended (%(default)s)")
    add("--trace", metavar="FILE", help="write the steps of all ranks as a trace for ui.perfetto.dev")
    add("--rates", metavar="FILE", help="write the rates that explain the steps, for plan --hardware")
    add("--json", action="store_true", help="print the report as JSON")
    add_options_of_wrap(parser)


def run(given: Namespace) -> int:
    """Measure, print the report, and return the exit code, which is 0."""
    found = profile(
        given.build,
        steps=given.steps,
        ranks=given.ranks,
        layout=given.layout,
        seed=given.seed,
        options={name: value for name in OPTIONS if (value := getattr(given, name)) is not None},
        trace=given.trace,
        rates=given.rates,
        limit=given.limit,
    )
    if given.json:
        print(found.report.to_json())
    else:
        Console(width=None if sys.stdout.isatty() else 120).print(found.report)
    return 0
