"""How long a training iteration takes under data parallelism: DDP, FSDP2 and ZeRO-1, with the same Muon.

    python benchmarks/iteration.py --ranks 4
    python benchmarks/iteration.py --ranks 4 --rounds 20 --layers 8 --json out.json

Forward and backward are those of the example's decoder on real text. It starts its own gloo ranks, one thread each.
benchmarks/README.md says what the figures mean.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.spawn import spawn

from canzona_compile.machine.hardware import this_processor
from canzona_compile.tools.traffic import TrafficCounter
from iteration_variants import PHASES, PLAIN, Variant, make_variants, same_bits
from latency_results import Spread, spread
from lm_data import Batches, standard_library
from lm_model import Decoder, ModelConfig

TIMEOUT = timedelta(minutes=3)
SCHEMA = 1
ITERATIONS = 3  # of a variant, one after the other, in each round


@dataclass(frozen=True, slots=True)
class IterationResult:
    """One variant.

    Attributes:
        iteration_ms, step_ms: wall times of the slowest rank.
        faster, step_faster: time of plain Muon under DDP divided by this one's, in the same round.
        bytes_per_element: sent by all ranks, by phase, per element of the model.
        collectives: per rank, by phase.
        gradient_bytes, state_bytes: the most that a rank holds.
        same_bits: whether parameters ended with the bits of plain Muon under DDP; with more than two ranks sums of
            gradients have several orders.
    """

    iteration_ms: Spread
    step_ms: Spread
    faster: Spread
    step_faster: Spread
    bytes_per_element: dict[str, float]
    collectives: dict[str, int]
    gradient_bytes: int
    state_bytes: int
    same_bits: bool


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4, help="processes (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=10, help="timed rounds (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="blocks of the decoder (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=4, help="sequences per rank (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="also write the results there")
    given = parser.parse_args()
    if min(given.ranks, given.rounds, given.layers, given.batch) < 1:
        parser.error("every number must be at least 1")
    return given


def main() -> None:
    settings = parse()
    with tempfile.TemporaryDirectory() as folder:
        spawn(run_rank, args=(settings, Path(folder, "ranks").as_uri()), nprocs=settings.ranks)


def run_rank(rank: int, settings: argparse.Namespace, meeting: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=settings.ranks, timeout=TIMEOUT)
    mesh = init_device_mesh("cpu", (settings.ranks,), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    config = ModelConfig(num_layers=settings.layers)
    model = Decoder(config)
    elements = sum(p.numel() for p in model.parameters())
    variants = make_variants(model, mesh)
    text = standard_library()
    batches = {v.name: Batches(text, batch=settings.batch, context=config.context, seed=0, part=rank) for v in variants}
    bytes_sent, calls = {}, {}
    peaks: dict[str, int] = {}
    for variant in variants:
        for _ in range(3):  # state is created, programs are made, buckets settle
            iterate(variant, batches[variant.name])
        found: list[int] = []
        with variant.gradient_peak(found):
            counters = iterate(variant, batches[variant.name], count=True)
        peaks[variant.name] = largest(max(found))
        bytes_sent[variant.name] = {phase: counters[phase].total().bytes_sent / elements for phase in PHASES}
        calls[variant.name] = {phase: counters[phase].collectives for phase in PHASES}
    times: dict[str, list[tuple[float, float]]] = {v.name: [] for v in variants}
    for number in range(settings.rounds):
        turn = number % len(variants)  # another one goes first each time
        for variant in variants[turn:] + variants[:turn]:
            dist.barrier()
            times[variant.name].append(timed(variant, batches[variant.name]))
    slowest = {name: shared(own) for name, own in times.items()}
    reference = next(v for v in variants if v.name == PLAIN)
    base = slowest[PLAIN]
    results = {}
    for variant in variants:
        own = slowest[variant.name]
        results[variant.name] = IterationResult(
            spread([a * 1e3 for a, _ in own]),
            spread([b * 1e3 for _, b in own]),
            spread([one[0] / two[0] for one, two in zip(base, own, strict=True)]),
            spread([one[1] / two[1] for one, two in zip(base, own, strict=True)]),
            bytes_sent[variant.name],
            calls[variant.name],
            peaks[variant.name],
            largest(variant.state_bytes()),
            same_bits(variant, reference),
        )
    if rank == 0:
        show(results, settings, elements)
    dist.destroy_process_group()


def iterate(variant: Variant, batches: Batches, count: bool = False) -> dict[str, TrafficCounter]:
    """Train for one iteration; count what each phase hands to process groups if `count`."""
    counters = {phase: TrafficCounter() for phase in PHASES} if count else {}
    inputs = batches.draw()
    if not count:
        variant.forward(*inputs).backward()
        variant.step()
        variant.zero_grad()
        return {}
    with counters["forward"]:
        loss = variant.forward(*inputs)
    with counters["backward"]:
        loss.backward()
    with counters["step"]:
        variant.step()
    variant.zero_grad()
    return counters


def timed(variant: Variant, batches: Batches) -> tuple[float, float]:
    """Mean seconds of an iteration on this rank, and of its step.

    Several iterations follow one another, and at the end all parameters are whole: what an iteration leaves to be sent
    during the next forward pass is paid by the variant that sends it.
    """
    drawn = [batches.draw() for _ in range(ITERATIONS)]
    steps = 0.0
    begin = time.perf_counter()
    for inputs in drawn:
        variant.forward(*inputs).backward()
        middle = time.perf_counter()
        variant.step()
        steps += time.perf_counter() - middle
        variant.zero_grad()
    variant.finish()
    return (time.perf_counter() - begin) / ITERATIONS, steps / ITERATIONS


def shared(own: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The times of the slowest rank in each round; a collective."""
    values = torch.tensor(own, dtype=torch.float64)
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return [(float(a), float(b)) for a, b in values.tolist()]


def largest(value: int) -> int:
    """The largest value of all ranks; a collective."""
    found = torch.tensor(value)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return int(found)


def show(results: dict[str, IterationResult], settings: argparse.Namespace, elements: int) -> None:
    console = Console(width=None if sys.stdout.isatty() else 150)
    title = (
        f"Muon and AdamW, {elements / 1e6:.1f} M parameters, {settings.ranks} gloo ranks of one thread on "
        f"{os.cpu_count()} cores of {this_processor()}, torch {torch.__version__}, medians of {settings.rounds} rounds "
        f"of {ITERATIONS} iterations (p10-p90)"
    )
    table = Table(title=title, title_justify="left")
    table.add_column("variant")
    for column in (
        "iteration ms",
        "faster",
        "step ms",
        "step faster",
        "B/element f+b+s",
        "collectives f+b+s",
        "gradients MB",
        "state MB",
        "bits",
    ):
        table.add_column(column, justify="right")
    for name, found in results.items():
        table.add_row(
            name,
            brief(found.iteration_ms, ".0f"),
            brief(found.faster, ".2f"),
            brief(found.step_ms, ".1f"),
            brief(found.step_faster, ".2f"),
            " + ".join(f"{found.bytes_per_element[phase]:.2f}" for phase in PHASES),
            " + ".join(str(found.collectives[phase]) for phase in PHASES),
            f"{found.gradient_bytes / 1e6:.1f}",
            f"{found.state_bytes / 1e6:.1f}",
            "equal" if found.same_bits else "rounding",
        )
    console.print(table)
    if settings.json:
        counted = {"schema": SCHEMA, "ranks": settings.ranks, "elements": elements, "rounds": settings.rounds}
        content = {**counted, "variants": {name: asdict(found) for name, found in results.items()}}
        Path(settings.json).write_text(json.dumps(content, indent=2) + "\n")


def brief(found: Spread, form: str) -> str:
    return f"{found.median:{form}} ({found.p10:{form}}-{found.p90:{form}})"


if __name__ == "__main__":
    main()
