"""How well the simulator predicts: steps of real ranks beside those that it plays on the same machine's rates.

    python benchmarks/simulator_validation.py
    python benchmarks/simulator_validation.py --ranks 2,4 --cases even,many-small --rounds 10 --json out.json
    python benchmarks/simulator_validation.py --ranks 2,4 --cases zero1-even,zero1-uneven --json out.json

It calibrates, starts gloo ranks of one thread, measures the steps of benchmarks/step_latency.py, and simulates the
same emitted steps. Of cases that begin with "zero1-" it measures and simulates the phases of an iteration. Exit code 1
if the median error is above the limit. benchmarks/README.md says what counts.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.spawn import spawn

from canzona_compile.machine.hardware import Hardware, named_hardware, this_processor
from canzona_compile.tools.calibration.calibrate import calibrate, processors
from latency_cases import CASES
from latency_variants import REPLICATED
from validation_rounds import QUIET, Comparison, compare_case
from zero1_validation import ZERO1_CASES, compare_zero1

SCHEMA = 1
RESULTS = Path(__file__).parent / "results" / "simulator_validation.json"
TIMEOUT = timedelta(minutes=5)  # of a collective


@dataclass(frozen=True, slots=True)
class Settings:
    """The command line."""

    ranks: tuple[int, ...]
    cases: tuple[str, ...]
    rounds: int
    limit: float
    patience: float
    json: str


@dataclass(frozen=True, slots=True)
class Results:
    """A whole run.

    Attributes:
        hardware: the calibration before the runs of so many ranks, by that number.
        median_error: of the absolute errors of `ours`, and of each phase under ZeRO-1, over cases and numbers of ranks
            where a round was quiet.
    """

    schema: int
    torch: str
    processors: int
    processor: str
    median_error: float
    limit: float
    comparisons: Sequence[Comparison]
    hardware: Mapping[int, Mapping[str, Any]]


def parse() -> Settings:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4,8", help="numbers of processes (default: %(default)s)")
    parser.add_argument("--cases", default=",".join(CASES), help="comma-separated (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=12, help="quiet rounds that are timed (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=0.2, help="of the median error (default: %(default)s)")
    parser.add_argument(
        "--patience", type=float, default=200.0, help="seconds of waiting for calm, in a case (default: %(default)s)"
    )
    parser.add_argument("--json", metavar="FILE", default=str(RESULTS), help="write the results there (%(default)s)")
    given = parser.parse_args()
    cases = tuple(given.cases.split(","))
    known = [*CASES, *ZERO1_CASES]
    if unknown := [name for name in cases if name not in known]:
        parser.error(f"no case {', '.join(unknown)}; there are {', '.join(known)}")
    ranks = tuple(int(text) if text.isdigit() else 0 for text in given.ranks.split(","))
    if given.rounds < 1 or min(ranks) < 2:
        parser.error("--rounds must be at least 1, and all of --ranks at least 2")
    return Settings(ranks, cases, given.rounds, given.limit, given.patience, given.json)


def main() -> int:
    settings = parse()
    logging.basicConfig(format="%(message)s")
    found: list[Comparison] = []
    rates: dict[int, Mapping[str, Any]] = {}
    for ranks in settings.ranks:
        print(f"calibrating, then {ranks} ranks", file=sys.stderr)
        # No more ranks than cores: those that take turns would find links slow.
        hardware, _ = calibrate(device="cpu", ranks=min(ranks, processors()))
        rates[ranks] = hardware.to_dict()
        found += compare(settings, ranks, hardware)
    counted = [one for one in found if one.variant != REPLICATED and one.quiet]
    error = statistics.median(abs(one.error) for one in counted) if counted else math.inf
    results = Results(SCHEMA, torch.__version__, processors(), this_processor(), error, settings.limit, found, rates)
    Path(settings.json).parent.mkdir(parents=True, exist_ok=True)
    Path(settings.json).write_text(json.dumps(asdict(results), indent=1) + "\n")
    Console(width=None if sys.stdout.isatty() else 120).print(table(results))
    total = sum(one.variant != REPLICATED for one in found)
    print(f"median error: {error:.1%} over {len(counted)} of {total}, limit {settings.limit:.0%}")
    return int(error > settings.limit)


def compare(settings: Settings, ranks: int, hardware: Hardware) -> list[Comparison]:
    """All cases on so many ranks."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "hardware.json").write_text(hardware.to_json())
        spawn(run_rank, args=(settings, ranks, folder), nprocs=ranks)
        found: list[Comparison] = torch.load(Path(folder, "found"), weights_only=False)
        return found


def run_rank(rank: int, settings: Settings, ranks: int, folder: str) -> None:
    """One process: all cases, then the results on rank 0."""
    torch.set_num_threads(1)
    meeting = Path(folder, "ranks").as_uri()
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks, timeout=TIMEOUT)
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
    hardware = named_hardware(str(Path(folder, "hardware.json")))
    found: list[Comparison] = []
    for name in settings.cases:
        measure, case = (compare_zero1, ZERO1_CASES[name]) if name in ZERO1_CASES else (compare_case, CASES[name])
        own = measure(case, mesh, hardware, settings.rounds, settings.patience)
        found += own
        for one in own if rank == 0 else []:
            print(
                f"{one.case}, {one.ranks} ranks, {one.variant}: {one.step_ms.median:.1f} ms measured in {one.quiet} of"
                f" {len(one.rounds)} rounds, {one.predicted_ms:.1f} ms predicted",
                file=sys.stderr,
            )
    if rank == 0:
        torch.save(found, Path(folder, "found"))
    dist.destroy_process_group()


def table(results: Results) -> Table:
    """Measured and predicted side by side."""
    made = Table(
        title=f"torch {results.torch}, gloo ranks of one thread on {results.processors} cores of {results.processor}"
    )
    for column in ("case", "variant"):
        made.add_column(column)
    for column in (
        "ranks",
        "measured ms (p10-p90)",
        "predicted ms",
        "error",
        "of CPU",
        f"rounds with < {QUIET:.0%} foreign",
    ):
        made.add_column(column, justify="right")
    for one in results.comparisons:
        measured = f"{one.step_ms.median:.1f} ({one.step_ms.p10:.1f}-{one.step_ms.p90:.1f})"
        counts = f"{one.quiet} of {len(one.rounds)}"
        predicted = f"{one.predicted_ms:.1f}"
        of_cpu = "" if one.cpu_error is None else f"{one.cpu_error:+.0%}"
        made.add_row(one.case, one.variant, str(one.ranks), measured, predicted, f"{one.error:+.0%}", of_cpu, counts)
    return made


if __name__ == "__main__":
    sys.exit(main())
