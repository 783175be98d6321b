"""`python -m canzona_compile calibrate`."""

from __future__ import annotations

import logging
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

from canzona_compile.compat.telling import shown
from canzona_compile.errors import CanzonaError
from canzona_compile.tools.calibration.calibrate import calibrate

log = logging.getLogger(__name__)


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of `calibrate` to its parser."""
    add = parser.add_argument
    add("-o", "--output", metavar="FILE", help="write the JSON there instead of to standard output")
    add("--device", choices=("cpu", "cuda"), help="what to measure (default: CUDA where there is one)")
    add("--base", metavar="NAME", help="kind of machine, or file, for rates that cannot be measured here")
    add("--ranks", type=int, default=2, help="gloo processes that are started on CPU (%(default)s)")
    add("--quick", action="store_true", help="fewer sizes and repetitions")


def run(given: Namespace) -> int:
    """Measure, and write the file that `plan --hardware` and `wrap(hardware=)` read; the exit code is 0."""
    if given.output and not Path(given.output).absolute().parent.is_dir():
        raise CanzonaError("there is no such folder", at=given.output, hint="make it first: measuring takes a while")
    with shown("calibrate", quiet=given.quiet):
        hardware, shows = calibrate(device=given.device, base=given.base, ranks=given.ranks, quick=given.quick)
    if not shows:
        return 0
    if given.output:
        Path(given.output).write_text(hardware.to_json(), encoding="utf-8")
        log.info("%s: measured %s; assumed %s", given.output, ", ".join(hardware.measured), ", ".join(hardware.assumed))
    else:
        sys.stdout.write(hardware.to_json())
    return 0
