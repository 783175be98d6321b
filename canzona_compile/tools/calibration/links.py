"""All-to-alls among ranks: how long the smallest takes, and how many bytes a second larger ones carry."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from canzona_compile.ir.hardware import Link

BYTES = {"cpu": (2**20, 2**23), "cuda": (2**26, 2**28)}  # that a rank sends, at which bandwidth is measured
MANY = 8  # times as many repetitions of the smallest, whose times vary most


@dataclass(frozen=True, slots=True)
class Exchange:
    """An all-to-all in which a rank sends equally much to each other rank, and nothing to itself."""

    group: dist.ProcessGroup
    received: Tensor
    sent: Tensor
    splits: list[int]

    @classmethod
    def of(cls, group: dist.ProcessGroup, size: int, device: torch.device) -> Exchange:
        """One in which every rank sends about `size` bytes, at least one to each peer."""
        ranks, own = dist.get_world_size(group), dist.get_rank(group)
        splits = [0 if rank == own else max(1, size // (ranks - 1)) for rank in range(ranks)]
        sent = torch.zeros(sum(splits), dtype=torch.uint8, device=device)
        return cls(group, torch.empty_like(sent), sent, splits)

    def __call__(self) -> None:
        work = dist.all_to_all_single(
            self.received, self.sent, self.splits, self.splits, group=self.group, async_op=True
        )
        assert work is not None
        work.wait()

    def seconds(self, repetitions: int) -> float:
        """Median time until the data is there.

        On CPU that is CPU time of this process, the thread that calls and those that move the bytes, since it is
        processors that the exchange takes; on CUDA it is wall time.
        """
        cuda = self.sent.is_cuda
        clock = time.perf_counter if cuda else time.process_time
        self()
        samples = []
        for _ in range(repetitions):
            start = clock()
            self()
            if cuda:
                torch.cuda.synchronize(self.sent.device)
            samples.append(clock() - start)
        return statistics.median(samples)


def smallest(group: dist.ProcessGroup, device: torch.device, repetitions: int) -> float:
    """Seconds of an all-to-all with next to no data."""
    return Exchange.of(group, 1, device).seconds(MANY * repetitions)


def bandwidth(group: dist.ProcessGroup, device: torch.device, repetitions: int) -> float:
    """Bytes per second that a rank sends while it receives as many."""
    seconds = moved = 0.0
    for size in BYTES[device.type]:
        exchange = Exchange.of(group, size, device)
        seconds += exchange.seconds(repetitions)
        moved += sum(exchange.splits)
    return moved / seconds


def link_of(latency: float, pair: float, ranks: int, rate: float) -> Link:
    """The link with these seconds of the smallest all-to-all, among `ranks` and between two of them."""
    if ranks == 2:
        return Link(rate, pair)
    per_peer = max(0.0, (latency - pair) / (ranks - 2))
    return Link(rate, max(0.0, pair - per_peer), per_peer)
