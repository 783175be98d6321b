"""What ranks measure together: all-to-alls, and a rank's bookkeeping in a step beside its program."""

from __future__ import annotations

import operator
import statistics
import time
from collections.abc import Sequence
from timeit import Timer
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import Parameter
from torch.optim import Muon
from torch.utils import benchmark

from canzona_compile.api.wrap import wrap
from canzona_compile.machine.hardware import Link
from canzona_compile.tools.calibration.measure import clearing

BYTES = {"cpu": (2**20, 2**23), "cuda": (2**26, 2**28)}  # that a rank sends, at which bandwidth is measured
MANY = 8  # times as many repetitions of the smallest, whose times vary most
MATRICES = 64
SIDE = 16  # rows and columns of each matrix: there is next to nothing to compute


def link_among(teams: Sequence[Sequence[int]], device: torch.device, repetitions: int) -> Link:
    """The link within this rank's team; all teams measure at once, and every rank calls this.

    Args:
        teams: two or more global ranks each. What the first rank of a team found holds for the team.
    """
    rank = dist.get_rank()
    groups = [(team, dist.new_group(list(team)), dist.new_group(list(team[:2]))) for team in teams]
    team, group, pair = next(one for one in groups if rank in one[0])
    assert isinstance(group, dist.ProcessGroup)
    near = 0.0
    if rank in team[:2]:
        assert isinstance(pair, dist.ProcessGroup)
        near, _ = all_to_all(pair, 1, device, MANY * repetitions)
    dist.barrier()
    latency, _ = all_to_all(group, 1, device, MANY * repetitions)
    timed = [all_to_all(group, size, device, repetitions) for size in BYTES[device.type]]
    rate = sum(sent for _, sent in timed) / sum(seconds for seconds, _ in timed)
    values = torch.tensor([latency, near, rate], dtype=torch.float64, device=device)
    dist.broadcast(values, team[0], group=group)
    latency, near, rate = values.tolist()
    return link_of(latency, near, len(team), rate)


def all_to_all(group: dist.ProcessGroup, size: int, device: torch.device, repetitions: int) -> tuple[float, int]:
    """Time an all-to-all in which a rank sends equally much to each other rank, and nothing to itself.

    On CPU that is CPU time of this process, of the thread that calls and of those that move the bytes, because the
    exchange takes processors. On CUDA it is wall time, and the clock waits for the device.

    Args:
        size: bytes that a rank sends, about; at least one to each peer.

    Returns:
        Seconds until the data is there, and the bytes that a rank sends.
    """
    ranks, own = dist.get_world_size(group), dist.get_rank(group)
    splits = [0 if rank == own else max(1, size // (ranks - 1)) for rank in range(ranks)]
    sent = torch.zeros(sum(splits), dtype=torch.uint8, device=device)
    received = torch.empty_like(sent)

    def exchange() -> None:
        work = dist.all_to_all_single(received, sent, splits, splits, group=group, async_op=True)
        assert work is not None
        work.wait()

    exchange()
    clock = benchmark.timer if sent.is_cuda else time.process_time
    return statistics.median(Timer(exchange, timer=clock).repeat(repetitions, 1)), sum(splits)


def link_of(latency: float, pair: float, ranks: int, rate: float) -> Link:
    """The link that explains two measurements of the smallest all-to-all.

    Args:
        latency: seconds of it among all `ranks`.
        pair: seconds of it between two of them.
        rate: bytes per second that a rank sends.
    """
    if ranks == 2:
        return Link(rate, pair)
    per_peer = max(0.0, (latency - pair) / (ranks - 2))
    return Link(rate, max(0.0, pair - per_peer), per_peer)


def bookkeeping(mesh: DeviceMesh, cold: int, repetitions: int) -> float:
    """Measure the CPU seconds of a steady step that its program does not take, by matrix.

    Args:
        mesh: one dim; the matrices are sharded over it as `fully_shard` does, and all of its ranks call this.
        cold: bytes of other data that the rank goes through before each step, to clear its caches.
    """

    def zeros() -> torch.Tensor:
        return distribute_tensor(torch.zeros(SIDE, SIDE, device="cpu"), mesh, [Shard(0)], src_data_rank=None)

    params = [Parameter(zeros()) for _ in range(MATRICES)]
    optimizer: Any = wrap(Muon(params, lr=0.0), strategy="owner")
    for param in params:
        param.grad = zeros()
    optimizer.step()
    optimizer.step()  # from now on the program is the same
    module, times = optimizer.canzona.step.program.module, [0.0, 0.0]  # CPU seconds at its begin and end
    module.register_forward_pre_hook(lambda *_: operator.setitem(times, 0, time.thread_time()))
    module.register_forward_hook(lambda *_: operator.setitem(times, 1, time.thread_time()))
    before = clearing(cold, torch.device("cpu"))
    samples = []
    for _ in range(repetitions):
        before()
        start = time.thread_time()
        optimizer.step()
        samples.append(time.thread_time() - start - (times[1] - times[0]))
    return statistics.median(samples) / MATRICES
