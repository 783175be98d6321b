"""The first hour on a node: `torchrun --nproc-per-node 8 -m canzona_compile.tools.accept`.

Without torchrun `python -m canzona_compile accept` does the same on one machine. Both take the same arguments.
"""

from __future__ import annotations

import logging
import os
import sys
from argparse import ArgumentParser
from collections.abc import Sequence

from canzona_compile.tools.acceptance.command import add_arguments, run
from canzona_compile.tools.output import exit_code


def main(arguments: Sequence[str] | None = None) -> int:
    """Take the steps as one of the launched processes; the exit code."""
    parser = ArgumentParser(prog="canzona_compile.tools.accept", description=__doc__.splitlines()[0])
    add_arguments(parser)
    given = parser.parse_args(arguments)
    logging.basicConfig(format="%(message)s")
    logging.getLogger("canzona_compile").setLevel(logging.INFO if os.environ.get("RANK", "0") == "0" else logging.ERROR)
    return exit_code(run, given)


if __name__ == "__main__":
    sys.exit(main())
