"""Every optimizer of published packages, wrapped: does it run, how, and with the bits of the plain one?

    python benchmarks/optimizer_survey.py
    python benchmarks/optimizer_survey.py --packages heavyball,torchao
    python benchmarks/optimizer_survey.py --only SOAP,Shampoo,Lion --steps 30 --json out.json

A few small matrices of uneven shapes, sharded over gloo ranks that the script starts itself. See README.md beside it.
"""

from __future__ import annotations

import argparse
import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: processes are forked later

import torch
from rich.console import Console

from survey_catalog import PLACES, catalog
from survey_results import SCHEMA, Survey
from survey_table import run_all, table_of
from survey_trial import Trial

SEED = 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", help=f"comma-separated, of {', '.join(PLACES)} (default: those installed)")
    parser.add_argument("--only", help="comma-separated names of optimizers (default: all)")
    parser.add_argument("--layout", choices=("fsdp", "ddp", "tp"), default="fsdp", help="(default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=2, help="processes (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=12, help="of every optimizer (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=300, help="seconds for one optimizer (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="also write the results there")
    given = parser.parse_args()
    if given.steps < 1 or given.ranks < 1:
        parser.error("--steps and --ranks must be at least 1")
    wanted = given.packages.split(",") if given.packages else list(PLACES)
    if unknown := [name for name in wanted if name not in PLACES]:
        parser.error(f"no package {', '.join(unknown)}; there are {', '.join(PLACES)}")
    versions, trials = {}, []
    for package in wanted:
        try:
            found = catalog(PLACES[package])
            if found.missing:
                raise ImportError(f"install {found.missing}")
        except ImportError as error:
            print(f"{package} is left out: {error}", file=sys.stderr)
            continue
        versions[package] = found.version
        trials += [
            Trial(package, PLACES[package], n, given.steps, SEED, layout=given.layout, nature=not found.compiles)
            for n in found.names()
        ]
    if given.only:
        names = given.only.split(",")
        if unknown := [name for name in names if name not in {trial.name for trial in trials}]:
            parser.error(f"no optimizer {', '.join(unknown)}; there are {', '.join(t.name for t in trials)}")
        trials = [trial for trial in trials if trial.name in names]
    results = Survey(SCHEMA, torch.__version__, versions, given.ranks, given.steps)
    results = run_all(trials, results, given.limit, given.json)
    Console(width=None if sys.stdout.isatty() else 200).print(table_of(results))


if __name__ == "__main__":
    main()
