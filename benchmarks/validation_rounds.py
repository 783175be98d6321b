"""Steps on real ranks, timed while the machine is left alone."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from canzona_compile.machine.hardware import Hardware
from canzona_compile.simulation.simulate import simulate
from canzona_compile.tools.calibration.calibrate import processors
from latency_cases import Case
from latency_results import Spread, spread
from latency_rounds import Gradients, Samples, random_matrices
from latency_variants import OURS, REPLICATED, Variant, make_variants

VARIANTS = (OURS, REPLICATED)
STAT = Path("/proc/stat")
TICKS = 100  # of STAT, per second
SHORTEST = 0.3  # seconds of a round, in which STAT says something
QUIET = 0.05  # of the processors' time that others may take in a round that counts
TRIES = 3  # times as many rounds as asked for, at most, to have enough quiet ones
LOOK = 0.5  # seconds of looking whether others are at work, before a round


@dataclass(frozen=True, slots=True)
class Round:
    """Some steps of one variant, or one phase of some iterations.

    Attributes:
        seconds: of each step, the slowest rank's wall time.
        cpu: seconds of all ranks' processes together, in the mean step.
        foreign: share of all processors' time that other jobs of the machine took.
    """

    seconds: tuple[float, ...]
    cpu: float
    foreign: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """One variant of a case on some ranks, measured and predicted.

    Attributes:
        step_ms: of the quiet rounds; of the quietest half where none was quiet, which then is no evidence.
        quiet: rounds that were.
        rounds: all of them, quiet or not.
        predicted_ms: until the last rank is done.
        compute_ms, exposed_ms, bubble_ms: of the mean rank, as predicted.
        error: predicted by measured, less 1.
        cpu_error: the same of CPU seconds, which other jobs disturb less; None where none are predicted.
    """

    case: str
    ranks: int
    variant: str
    step_ms: Spread
    quiet: int
    rounds: Sequence[Round]
    predicted_ms: float
    compute_ms: float
    exposed_ms: float
    bubble_ms: float
    error: float
    cpu_error: float | None = None


def compare_case(case: Case, mesh: DeviceMesh, hardware: Hardware, rounds: int, patience: float) -> list[Comparison]:
    """Measure the variants of a case in turns, then predict each from the step that it ran; a collective."""
    full = random_matrices(case.shapes, seed=0)
    variants = [v for v in make_variants(full, mesh, "auto", "muon") if v.name in VARIANTS]
    gradients = Gradients(case.shapes, mesh)
    lasts = {}
    for variant in variants:
        for number in (0, 1):  # the first one plans; from the second on the program is the same
            gradients.give(variant, number)
            dist.barrier()
            start = time.perf_counter()
            variant.step()
            lasts[variant.name] = agreed(time.perf_counter() - start)
    steps = {name: max(1, round(SHORTEST / seconds)) for name, seconds in lasts.items()}
    taken: dict[str, list[Round]] = {v.name: [] for v in variants}
    for number in range(TRIES * rounds):
        waiting = [v for v in variants if quiet(taken[v.name]) < rounds]
        turn = number % max(1, len(waiting))  # another one goes first each time
        for variant in waiting[turn:] + waiting[:turn]:
            patience -= await_calm(patience)
            taken[variant.name].append(take(variant, gradients, steps[variant.name]))
    return [comparison(case, variant, taken[variant.name], hardware) for variant in variants]


def quiet(rounds: Sequence[Round]) -> int:
    return sum(one.foreign <= QUIET for one in rounds)


def await_calm(patience: float) -> float:
    """Wait until others leave the machine alone, or patience ends; the seconds that it took. A collective."""
    start = time.monotonic()
    while dist.get_rank() == 0 and STAT.exists() and time.monotonic() - start < patience:
        busy = busy_seconds()
        time.sleep(LOOK)
        if (busy_seconds() - busy) / (LOOK * processors()) <= QUIET:
            break
    dist.barrier()
    return time.monotonic() - start


def agreed(seconds: float) -> float:
    """The longest of all ranks; a collective."""
    value = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return float(value)


def take(variant: Variant, gradients: Gradients, steps: int) -> Round:
    """Time some steps, and see whether anybody else was at work; a collective."""
    samples = Samples()

    def work() -> None:
        for number in range(steps):
            gradients.give(variant, number)
            samples.take(variant, number)

    cpu, foreign = watched(work)
    walls = tuple(sample.wall for sample in samples.shared(variant.name).values())
    return Round(walls, cpu / steps, foreign)


def watched(work: Callable[[], None]) -> tuple[float, float]:
    """Do some work on all ranks; a collective.

    Returns:
        CPU seconds of all ranks' processes, and the share of all processors' time that other jobs took meanwhile.
    """
    dist.barrier()
    cpu, wall, busy = time.process_time(), time.perf_counter(), busy_seconds()
    work()
    dist.barrier()
    wall, busy = time.perf_counter() - wall, busy_seconds() - busy
    own = torch.tensor([time.process_time() - cpu], dtype=torch.float64)
    dist.all_reduce(own)
    foreign = torch.tensor([(busy - float(own)) / (wall * processors())], dtype=torch.float64)
    dist.broadcast(foreign, 0)
    return float(own), max(0.0, float(foreign))


def chosen_rounds(rounds: Sequence[Round]) -> Sequence[Round]:
    """The quiet ones; the quietest half if none was quiet."""
    return sorted(rounds, key=lambda one: one.foreign)[: quiet(rounds) or (len(rounds) + 1) // 2]


def busy_seconds() -> float:
    """Seconds that all processors together were not idle, other machines on the same hardware included."""
    if not STAT.exists():
        return 0.0  # then no round is known to be disturbed
    user, nice, system, _idle, _wait, *others = map(int, STAT.read_text().split("\n", 1)[0].split()[1:9])
    return (user + nice + system + sum(others)) / TICKS


def comparison(case: Case, variant: Variant, rounds: Sequence[Round], hardware: Hardware) -> Comparison:
    measured = spread([seconds * 1e3 for one in chosen_rounds(rounds) for seconds in one.seconds])
    optimizer: Any = variant.optimizer
    found = simulate(optimizer.canzona.step, hardware)
    return Comparison(
        case=case.name,
        ranks=dist.get_world_size(),
        variant=variant.name,
        step_ms=measured,
        quiet=quiet(rounds),
        rounds=rounds,
        predicted_ms=found.seconds * 1e3,
        compute_ms=statistics.fmean(rank.compute for rank in found.ranks) * 1e3,
        exposed_ms=statistics.fmean(rank.exposed for rank in found.ranks) * 1e3,
        bubble_ms=statistics.fmean(rank.bubble for rank in found.ranks) * 1e3,
        error=found.seconds * 1e3 / measured.median - 1,
    )
