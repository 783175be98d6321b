"""How long an optimizer step takes: ours, replicated, the optimizer itself on DTensors, and one rank alone.

    python benchmarks/step_latency.py --ranks 4
    python benchmarks/step_latency.py --ranks 4 --cases even,uneven --rounds 40 --json out.json
    python benchmarks/step_latency.py --ranks 4 --optimizer soap --cases even
    python benchmarks/step_latency.py --first-step

It starts its own gloo ranks, one thread each. benchmarks/README.md says what the figures mean.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import get_args

import torch
import torch.distributed as dist
from rich.console import Console
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.spawn import spawn

from canzona_compile.ir.options import StrategyOption
from canzona_compile.machine.hardware import this_processor
from latency_cases import CASES, QWEN, QWEN_HOST
from latency_optimizers import OPTIMIZERS
from latency_results import SCHEMA, Results
from latency_rounds import measure_case, measure_model
from latency_tables import case_table, model_table

TIMEOUT = timedelta(minutes=3)  # of a collective


@dataclass(frozen=True, slots=True)
class Settings:
    """The command line."""

    ranks: int
    cases: tuple[str, ...]
    rounds: int
    strategy: StrategyOption
    optimizer: str
    first_step: bool
    json: str | None


def parse() -> Settings:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, help="processes (default: 4; 1 with --first-step)")
    parser.add_argument("--cases", default=",".join(CASES), help="comma-separated (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=8, help="timed rounds (default: %(default)s)")
    parser.add_argument("--strategy", choices=get_args(StrategyOption), default="auto", help="of ours")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="muon", help="which one (default: %(default)s)")
    parser.add_argument(
        "--first-step",
        action="store_true",
        help="instead of the cases: the stages of a 448-matrix model's first step",
    )
    parser.add_argument("--json", metavar="FILE", help="also write the results there")
    given = parser.parse_args()
    cases = tuple(given.cases.split(","))
    if unknown := [name for name in cases if name not in CASES]:
        parser.error(f"no case {', '.join(unknown)}; there are {', '.join(CASES)}")
    ranks = given.ranks or (1 if given.first_step else 4)
    if given.rounds < 1 or ranks < 1:
        parser.error("--rounds and --ranks must be at least 1")
    return Settings(ranks, cases, given.rounds, given.strategy, given.optimizer, given.first_step, given.json)


def main() -> None:
    settings = parse()
    with tempfile.TemporaryDirectory() as folder:
        meeting = Path(folder, "ranks").as_uri()
        spawn(run_rank, args=(settings, meeting), nprocs=settings.ranks)


def run_rank(rank: int, settings: Settings, meeting: str) -> None:
    """One process: all cases, then the results on rank 0."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=settings.ranks, timeout=TIMEOUT)
    mesh = init_device_mesh("cpu", (settings.ranks,))
    console = Console(quiet=rank != 0, width=None if sys.stdout.isatty() else 120)
    results = Results(
        schema=SCHEMA,
        torch=torch.__version__,
        ranks=settings.ranks,
        cores=os.cpu_count() or 0,
        processor=this_processor(),
        strategy=settings.strategy,
        optimizer=settings.optimizer,
        rounds=settings.rounds,
    )
    console.print(
        f"{results.optimizer}, torch {results.torch}, {results.ranks} gloo ranks of one thread"
        f" on {results.cores} cores of {results.processor}, {results.rounds} rounds\n"
    )
    if settings.first_step:
        for model in (QWEN, QWEN_HOST):
            timed = measure_model(model, mesh, settings.strategy, settings.rounds)
            console.print(model_table(timed))
            results = replace(results, models=[*results.models, timed])
    else:
        for name in settings.cases:
            found = measure_case(CASES[name], mesh, settings.strategy, settings.optimizer, settings.rounds)
            console.print(case_table(found))
            results = replace(results, cases=[*results.cases, found])
    if rank == 0 and settings.json:
        Path(settings.json).write_text(json.dumps(asdict(results), indent=2) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
