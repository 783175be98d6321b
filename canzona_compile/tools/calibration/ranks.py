"""The ranks that measure: processes of our own on CPU, the caller's own process on CUDA."""

from __future__ import annotations

import logging
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from canzona_compile.compat.telling import tell
from canzona_compile.errors import CanzonaError
from canzona_compile.machine.hardware import Link
from canzona_compile.tools.calibration import links, measure
from canzona_compile.tools.calibration.bookkeeping import bookkeeping
from canzona_compile.tools.calibration.clock import Clock
from canzona_compile.tools.calibration.measure import MeasurementSizes, Points, Products
from canzona_compile.tools.processes import run_ranks

log = logging.getLogger(__name__)

CPU_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
CUDA_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
STEPS = 4  # steps per repetition of the other measurements: one takes milliseconds
LIMIT = 3600.0  # seconds of a whole calibration on CPU, which takes minutes: only a hang takes so long
TIMEOUT = timedelta(minutes=5)  # of a collective: that long ranks wait for the slowest to measure


@dataclass(frozen=True, slots=True)
class Measured:
    """What ranks found; None where it cannot be measured here.

    Attributes:
        products, factorizations: by dtype, and by operator.
        bandwidth: bytes per second of elementwise work.
        transposed: bytes per second of copies to the other order, by size.
        launch: seconds of an operator on next to no data.
        host: seconds of bookkeeping per matrix and step.
        node, network: links among ranks of a node, and between nodes.
    """

    products: Mapping[str, Products]
    factorizations: Mapping[str, Points]
    bandwidth: float
    transposed: Points
    launch: float
    host: float | None = None
    node: Link | None = None
    network: Link | None = None


class Stages:
    """Tells which of some measurements is taken, on one of the ranks.

    Args:
        total: how many there are.
        tells: whether this rank is the one.
    """

    def __init__(self, total: int, tells: bool) -> None:
        self.total, self.tells, self.begun = total, tells, 0

    def next(self, words: str) -> None:
        """Begin the next measurement."""
        if self.tells:
            tell(words, self.begun, self.total)
            log.info("%d of %d: %s", self.begun + 1, self.total, words)
        self.begun += 1


def number_of(clock: Clock, dtypes: Sequence[torch.dtype]) -> int:
    """How many measurements `alone` takes."""
    return len(dtypes) + len(operators_on(clock.device)) + 1


def operators_on(device: torch.device) -> tuple[str, ...]:
    """The factorizations that are measured on a device."""
    return measure.ALONE if device.type == "cpu" else (*measure.ALONE, *measure.STACKED)


def alone(clock: Clock, extent: MeasurementSizes, dtypes: Sequence[torch.dtype], stages: Stages) -> Measured:
    """Measure everything that a rank can measure by itself."""
    found = {}
    for dtype in dtypes:
        name = str(dtype).removeprefix("torch.")
        stages.next(f"products of {name}")
        found[name] = measure.products(clock, dtype, extent.products, extent.cold)
    operators = operators_on(clock.device)
    decomposed = {}
    for name in operators:
        stages.next(name)
        decomposed[name] = measure.factorization(clock, name, extent.factorizations)
    stages.next("memory, launches")
    turned = measure.transposed(clock, extent.transposed)
    return Measured(
        found, decomposed, measure.bandwidth(clock, extent.cold), turned, measure.launch(clock, extent.cold)
    )


def merged(found: Sequence[Measured]) -> Measured:
    """The medians over ranks that measured at the same time."""

    def points(curves: Sequence[Points]) -> Points:
        together = zip(*curves, strict=False)  # one may have stopped at a smaller size
        return tuple((ranks[0][0], statistics.median(rate for _, rate in ranks)) for ranks in together)

    first = found[0]
    products = {
        name: Products(
            statistics.median(one.products[name].call for one in found),
            points([one.products[name].points for one in found]),
        )
        for name in first.products
    }
    factorizations = {name: points([one.factorizations[name] for one in found]) for name in first.factorizations}
    return replace(
        first,
        products=products,
        factorizations=factorizations,
        bandwidth=statistics.median(one.bandwidth for one in found),
        transposed=points([one.transposed for one in found]),
        launch=statistics.median(one.launch for one in found),
    )


# -- on CPU ----------------------------------------------------------------------------------------


def cpu(ranks: int, extent: MeasurementSizes) -> Measured:
    """Start gloo ranks of one thread, which all measure at once.

    More ranks than cores take turns, as they would in a step, and lose what they had in the caches.

    Args:
        ranks: how many to start, 1 or more.
        extent: what they measure.

    Returns:
        What they found; without a network, since all are on this machine, and without a link if there is one rank.

    Raises:
        CanzonaError: a rank failed.
    """
    try:
        found: list[Measured] = run_ranks(ranks, cpu_rank, (ranks, extent), LIMIT, patience=TIMEOUT.total_seconds())
    except CanzonaError as error:
        hint = "fewer --ranks need less memory and fewer ports"
        raise CanzonaError(f"a rank of the calibration failed: {error.problem}", hint=hint) from error
    return found[0]


def cpu_rank(rank: int, ranks: int, extent: MeasurementSizes) -> Measured:
    """Measure in one of the processes; every rank returns the same."""
    level = log.getEffectiveLevel()
    logging.getLogger().setLevel(logging.WARNING)
    log.setLevel(level)
    clock, device = Clock(torch.device("cpu"), extent.repetitions), torch.device("cpu")
    dist.barrier()
    everybody: list[Measured | None] = [None] * ranks
    stages = Stages(number_of(clock, CPU_DTYPES) + 1 + (ranks > 1), rank == 0)
    dist.all_gather_object(everybody, alone(clock, extent, CPU_DTYPES, stages))
    found = merged([one for one in everybody if one is not None])
    if ranks > 1:
        stages.next("all-to-alls")
        found = replace(found, node=link_among([range(ranks)], device, extent.repetitions))
    stages.next("bookkeeping of a step")
    seconds = bookkeeping(init_device_mesh("cpu", (ranks,)), extent.cold, STEPS * extent.repetitions)
    host = torch.tensor([seconds], dtype=torch.float64, device="cpu")
    dist.all_reduce(host)
    return replace(found, host=float(host) / ranks)


def link_among(teams: Sequence[Sequence[int]], device: torch.device, repetitions: int) -> Link:
    """The link within this rank's team; all teams measure at once, and every rank calls this.

    Args:
        teams: two or more global ranks each. What the first rank of a team found holds for the team.
        device: of this rank.
        repetitions: of each measurement.
    """
    rank = dist.get_rank()
    groups = [(team, dist.new_group(list(team)), dist.new_group(list(team[:2]))) for team in teams]
    team, group, pair = next(one for one in groups if rank in one[0])
    assert isinstance(group, dist.ProcessGroup)
    near = 0.0
    if rank in team[:2]:
        assert isinstance(pair, dist.ProcessGroup)
        near = links.smallest(pair, device, repetitions)
    dist.barrier()
    found = [links.smallest(group, device, repetitions), near, links.bandwidth(group, device, repetitions)]
    values = torch.tensor(found, dtype=torch.float64, device=device)
    dist.broadcast(values, team[0], group=group)
    latency, near, rate = values.tolist()
    return links.link_of(latency, near, len(team), rate)


# -- on CUDA ---------------------------------------------------------------------------------------


def cuda(extent: MeasurementSizes) -> tuple[int, Measured]:
    """Measure this process's GPU, and links together with the other processes that torchrun started, if it did.

    Every node has equally many ranks, whose numbers follow one another, as torchrun starts them. Links are measured
    within a node and between nodes, where there are other ranks.

    Returns:
        This process's rank, and what all ranks found.
    """
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    started = ranks > 1 and not dist.is_initialized()
    if started:
        dist.init_process_group("nccl", timeout=TIMEOUT, device_id=device)
    clock = Clock(device, extent.repetitions)
    stages = Stages(number_of(clock, CUDA_DTYPES) + (ranks > 1), int(os.environ.get("RANK", "0")) == 0)
    found = alone(clock, extent, CUDA_DTYPES, stages)
    if ranks == 1:
        return 0, found
    everybody: list[Measured | None] = [None] * ranks
    dist.all_gather_object(everybody, found)
    found = merged([one for one in everybody if one is not None])
    stages.next("all-to-alls")
    near = int(os.environ.get("LOCAL_WORLD_SIZE", str(ranks)))
    if near > 1:
        nodes = [range(first, first + near) for first in range(0, ranks, near)]
        found = replace(found, node=link_among(nodes, device, extent.repetitions))
    if near < ranks:
        across = [range(local, ranks, near) for local in range(near)]
        found = replace(found, network=link_among(across, device, extent.repetitions))
    rank = dist.get_rank()
    dist.barrier()
    if started:
        dist.destroy_process_group()
    return rank, found
