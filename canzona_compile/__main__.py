"""The command line: `python -m canzona_compile COMMAND`, or `canzona-compile COMMAND`.

Data goes to standard output, everything else to standard error. Exit codes: 0 well, 1 what a command found, as
its help says, 2 a usage error, or that it could not be done.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from canzona_compile import __version__
from canzona_compile.compat.telling import set_up
from canzona_compile.tools import tune as tuning
from canzona_compile.tools.calibration import calibrate as calibration
from canzona_compile.tools.output import exit_code
from canzona_compile.tools.planning import command as planning
from canzona_compile.tools.verification import check as verify


@dataclass(frozen=True, slots=True)
class Command:
    """A subcommand: its arguments, and what runs it and returns the exit code."""

    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


COMMANDS = {
    "plan": Command(
        "predict the step of a model on a mesh, and write the plan that a run would execute",
        planning.add_arguments,
        planning.run,
    ),
    "calibrate": Command(
        "measure the rates of this machine, for plan --hardware and wrap(..., hardware=)",
        calibration.add_arguments,
        calibration.run,
    ),
    "tune": Command(
        "measure which kernels beat the library on this GPU, and save the result for later runs",
        tuning.add_arguments,
        tuning.run,
    ),
    "verify": Command(
        "compare the wrapped optimizer with the plain one on your model; exit code 1 if a bit differs",
        verify.add_arguments,
        verify.run,
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    parser = argparse.ArgumentParser(prog="canzona-compile", description="Matrix optimizers on sharded models.")
    parser.add_argument("--version", action="version", version=f"canzona-compile {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        added = commands.add_parser(name, help=command.help, description=command.help)
        added.add_argument("--quiet", action="store_true", help="do not print progress to standard error")
        command.add_arguments(added)
    given = parser.parse_args(arguments)
    if not set_up():
        logging.basicConfig(format="%(message)s")
        logging.getLogger("canzona_compile").setLevel(logging.WARNING if given.quiet else logging.INFO)
    if os.getcwd() not in sys.path:  # an installed script has its own folder there instead
        sys.path.insert(0, os.getcwd())
    return exit_code(COMMANDS[given.command].run, given)


if __name__ == "__main__":
    sys.exit(main())
