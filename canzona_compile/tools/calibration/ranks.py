"""The ranks that measure: those that torchrun started; else processes of our own on CPU, and one process on CUDA."""

from __future__ import annotations

import logging
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import timedelta
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from canzona_compile.compat.telling import tell
from canzona_compile.errors import CanzonaError
from canzona_compile.machine.hardware import Link
from canzona_compile.runtime.waiter import Waiter
from canzona_compile.session.rates import exchanges
from canzona_compile.tools.calibration import measure
from canzona_compile.tools.calibration.clock import Clock
from canzona_compile.tools.calibration.measure import MeasurementSizes
from canzona_compile.tools.calibration.together import bookkeeping, link_among
from canzona_compile.tools.processes import rank_calls, run

log = logging.getLogger(__name__)

MeasuredRates = dict[str, Any]  # what was measured, by the names of fields of `Hardware` and as its file has them

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
STEPS = 4  # steps per repetition of the other measurements: one takes milliseconds
LIMIT = 3600.0  # seconds of a whole calibration on CPU, which takes minutes: only a hang takes so long
TIMEOUT = timedelta(minutes=5)  # of a collective: that long ranks wait for the slowest to measure


def cpu(ranks: int, extent: MeasurementSizes) -> MeasuredRates:
    """Start gloo ranks of one thread, which all measure at once.

    More ranks than cores take turns, as they would in a step, and lose what they had in the caches.

    Returns:
        What they found; without a network, since all are on this machine, and without a link if there is one rank.
    """
    # What keeps ranks from meeting has a hint of its own, so it is not among those of a rank that fails.
    calls, _store = rank_calls(ranks, cpu_rank, (ranks, extent), TIMEOUT.total_seconds())
    try:
        found: list[MeasuredRates] = run(calls, LIMIT)
    except CanzonaError as error:
        hint = "fewer --ranks need less memory and fewer ports"
        raise CanzonaError(f"a rank of the calibration failed: {error.problem}", hint=hint) from error
    return found[0]


def cpu_rank(rank: int, ranks: int, extent: MeasurementSizes) -> MeasuredRates:
    """Measure in one of the processes; every rank returns the same."""
    level = log.getEffectiveLevel()
    logging.getLogger().setLevel(logging.WARNING)
    log.setLevel(level)
    dist.barrier()
    return measured(torch.device("cpu"), extent, rank, ranks, ranks)


def joined(kind: str, extent: MeasurementSizes) -> tuple[int, MeasuredRates]:
    """Measure in this process, and links together with the other processes that torchrun started, if it did.

    Every node has equally many ranks, whose numbers follow one another, as torchrun starts them. Links are measured
    within a node and between nodes, where there are other ranks.
    """
    device = torch.device("cpu")
    if kind == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    started = ranks > 1 and not dist.is_initialized()
    if started and kind == "cuda":
        dist.init_process_group("nccl", timeout=TIMEOUT, device_id=device)
    elif started:
        dist.init_process_group("gloo", timeout=TIMEOUT)
    found = measured(device, extent, rank, ranks, int(os.environ.get("LOCAL_WORLD_SIZE", str(ranks))))
    if ranks > 1:
        dist.barrier()
    if started:
        dist.destroy_process_group()
    return rank, found


# -- on a rank -------------------------------------------------------------------------------------


def measured(device: torch.device, extent: MeasurementSizes, rank: int, ranks: int, near: int) -> MeasuredRates:
    """Measure all that can be measured here. All ranks call this at once; every one of them returns the same."""
    clock, on_cpu = Clock(device, extent.repetitions), device.type == "cpu"
    operators = measure.ALONE if on_cpu else (*measure.ALONE, *measure.STACKED)
    begin = stages(len(DTYPES) + len(operators) + 1 + (ranks > 1) + on_cpu, rank == 0)
    found = alone(clock, extent, operators, begin)
    if ranks > 1:
        everybody: list[Any] = [None] * ranks
        dist.all_gather_object(everybody, found)
        found = medians(everybody)
        begin("all-to-alls")
        nodes = [range(first, first + near) for first in range(0, ranks, near)]
        across = [range(local, ranks, near) for local in range(near)]
        for name, teams in (("node", nodes), ("network", across)):
            if len(teams[0]) == 1:
                continue
            if on_cpu and name == "network":
                found |= between_hosts(teams, device)
            else:
                found[name] = asdict(link_among(teams, device, extent.repetitions))
    if on_cpu:
        begin("bookkeeping of a step")
        seconds = bookkeeping(init_device_mesh("cpu", (ranks,)), extent.cold, STEPS * extent.repetitions)
        host = torch.tensor([seconds], dtype=torch.float64, device="cpu")
        dist.all_reduce(host)
        found["host"] = float(host) / ranks
    return found


def between_hosts(teams: Sequence[Sequence[int]], device: torch.device) -> MeasuredRates:
    """The link between hosts, where bytes wait on a wire and not for a core, and what runs beside that.

    On one host a rank's processor moves the bytes, which `link_among` counts.
    """
    groups = [(team, dist.new_group(list(team))) for team in teams]
    group = next(own for team, own in groups if dist.get_rank() in team)
    assert isinstance(group, dist.ProcessGroup)
    own = exchanges(group, device, Waiter([], device), torch.float32)
    slowest = torch.tensor(list(own.values()), dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    latency, seconds, exposed = slowest.tolist()
    return {"network": asdict(Link(1 / seconds, latency)), "overlap": round(1.0 - exposed, 1)}


def stages(total: int, tells: bool) -> Callable[[str], None]:
    """What is to be called at the begin of each of `total` measurements: it tells that, on one of the ranks."""
    numbers = count()

    def begin(words: str) -> None:
        number = next(numbers)
        if tells:
            tell(words, number, total)
            log.info("%d of %d: %s", number + 1, total, words)

    return begin


def alone(
    clock: Clock, extent: MeasurementSizes, operators: Sequence[str], begin: Callable[[str], None]
) -> MeasuredRates:
    """Measure what a rank can measure by itself. "other" factorizations get the rates of the slower one of two."""
    points, calls, curves = {}, {}, {}
    for name, dtype in DTYPES.items():
        begin(f"products of {name}")
        calls[name], points[name] = measure.products(clock, dtype, extent.products, extent.cold)
    for name in operators:
        begin(name)
        curves[name] = measure.factorization(clock, name, extent.factorizations)
    one, two = (curves[name] for name in measure.ALONE)
    curves["other"] = tuple((size, min(rate, other)) for (size, rate), (_, other) in zip(one, two, strict=False))
    begin("memory, launches")
    return {
        "products": points,
        **({"product_calls": calls} if clock.device.type == "cpu" else {}),  # on CUDA a call is but a launch
        "factorizations": curves,
        "transposed": measure.transposed(clock, extent.transposed),
        "bandwidth": measure.bandwidth(clock, extent.cold),
        "launch": measure.launch(clock, extent.cold),
    }


def medians(found: Sequence[Any]) -> Any:
    """The medians over ranks of what they measured at the same time, number by number."""
    first = found[0]
    if isinstance(first, dict):
        return {name: medians([own[name] for own in found]) for name in first}
    if isinstance(first, tuple):
        return tuple(map(medians, zip(*found, strict=False)))  # a curve may have stopped at a smaller size
    return statistics.median(found)
