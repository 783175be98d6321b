"""`python -m canzona_compile calibrate`."""

from __future__ import annotations

import logging
from argparse import ArgumentParser, Namespace

from canzona_compile.compat.telling import shown
from canzona_compile.tools.calibration.calibrate import calibrate
from canzona_compile.tools.output import check_output, write

log = logging.getLogger(__name__)


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of `calibrate` to its parser."""
    add = parser.add_argument
    add("-o", "--output", metavar="FILE", help="write the JSON to this file instead of standard output")
    add("--device", choices=("cpu", "cuda"), help="the device to measure (default: cuda if there is one)")
    add("--base", metavar="NAME", help="machine or file that gives the rates which cannot be measured here")
    add("--ranks", type=int, default=2, help="number of gloo processes to start on CPU (%(default)s)")
    add("--quick", action="store_true", help="measure fewer sizes, with fewer repetitions")


def run(given: Namespace) -> int:
    """Measure, and write the file that `plan --hardware` and `wrap(hardware=)` read; the exit code is 0."""
    check_output(given.output, "-o")
    with shown("calibrate", quiet=given.quiet):
        hardware, shows = calibrate(device=given.device, base=given.base, ranks=given.ranks, quick=given.quick)
    if not shows:
        return 0
    write(hardware.to_json(), given.output, "-o")
    if given.output is not None:
        log.info("%s: measured %s; assumed %s", given.output, ", ".join(hardware.measured), ", ".join(hardware.assumed))
    return 0
