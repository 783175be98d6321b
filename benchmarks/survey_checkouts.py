"""Optimizers of repositories that the package index does not have, wrapped, against the plain ones.

    python benchmarks/survey_checkouts.py emerging --checkout Emerging-Optimizers
    python benchmarks/survey_checkouts.py shampoo --checkout optimizers --layouts ddp,tp
    python benchmarks/survey_checkouts.py kl --checkout KL-Methods
    python benchmarks/survey_checkouts.py splus --checkout splus/torch
    python benchmarks/survey_checkouts.py polargrad --checkout polargrad

`emerging` is NVIDIA-NeMo/Emerging-Optimizers, which needs Python 3.12 and absl-py; `shampoo` is Distributed Shampoo
of facebookresearch/optimizers, for one device, which needs Python 3.12; `kl` is yorkerlin/KL-Methods; `splus` is the
folder `torch` of kvfrans/splus; `polargrad` is the optimizer for one device of timlautk/polargrad. See README.md
beside it.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: processes are forked later

import torch
from rich.console import Console

from survey_catalog import catalog
from survey_results import SCHEMA, Survey
from survey_table import run_all, table_of
from survey_trial import Trial

SEED = 1000
PLACES = {name: f"survey_repositories:{name.upper()}" for name in ("emerging", "shampoo", "kl", "splus", "polargrad")}
LAYOUTS = {"shampoo": "ddp,tp"}
OLDEST = {"emerging": (3, 12), "shampoo": (3, 12)}  # Python: the repository's code is not read by older ones


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("repository", choices=sorted(PLACES))
    parser.add_argument("--checkout", required=True, metavar="DIR", help="the repository")
    parser.add_argument("--only", help="comma-separated names of optimizers (default: all)")
    parser.add_argument("--layouts", help="comma-separated: fsdp, ddp, tp (default: fsdp; for shampoo ddp,tp)")
    parser.add_argument("--ranks", type=int, default=3, help="processes (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=25, help="of every optimizer (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=300, help="seconds for one optimizer (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="also write the results there")
    given = parser.parse_args()
    oldest = OLDEST.get(given.repository, (3, 11))
    if sys.version_info < oldest:
        parser.error(f"{given.repository} needs Python {'.'.join(map(str, oldest))}")
    folder, place = str(Path(given.checkout).resolve()), PLACES[given.repository]
    found = catalog(place, folder)
    if found.missing:
        parser.error(f"missing: {found.missing}")
    names = given.only.split(",") if given.only else found.names()
    if unknown := [name for name in names if name not in found.names()]:
        parser.error(f"no optimizer {', '.join(unknown)}; there are {', '.join(found.names())}")
    layouts = (given.layouts or LAYOUTS.get(given.repository, "fsdp")).split(",")
    trials = [
        Trial(given.repository, place, name, given.steps, SEED, folder, layout, nature=False)
        for name in names
        for layout in layouts
    ]
    results = Survey(SCHEMA, torch.__version__, {given.repository: ""}, given.ranks, given.steps)
    results = run_all(trials, results, given.limit, given.json)
    Console(width=None if sys.stdout.isatty() else 200).print(table_of(results))


if __name__ == "__main__":
    main()
