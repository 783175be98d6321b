"""All-to-alls among ranks: how long the smallest takes, and how many bytes a second larger ones carry."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from timeit import Timer

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import benchmark

from canzona_compile.machine.hardware import Link

BYTES = {"cpu": (2**20, 2**23), "cuda": (2**26, 2**28)}  # that a rank sends, at which bandwidth is measured
MANY = 8  # times as many repetitions of the smallest, whose times vary most


@dataclass(frozen=True, slots=True)
class TimedAllToAll:
    """An all-to-all in which a rank sends equally much to each other rank, and nothing to itself."""

    group: dist.ProcessGroup
    received: Tensor
    sent: Tensor
    splits: list[int]

    @classmethod
    def of(cls, group: dist.ProcessGroup, size: int, device: torch.device) -> TimedAllToAll:
        """An exchange in which every rank sends about `size` bytes, at least one to each peer."""
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
        """The median time until the data is there, in seconds; all ranks of the group call this.

        On CPU that is CPU time of this process, of the thread that calls and of those that move the bytes, because the
        exchange takes processors. On CUDA it is wall time, and the clock waits for the device.
        """
        self()
        clock = benchmark.timer if self.sent.is_cuda else time.process_time
        return statistics.median(Timer(self, timer=clock).repeat(repetitions, 1))


def smallest(group: dist.ProcessGroup, device: torch.device, repetitions: int) -> float:
    """Seconds of an all-to-all in which every rank sends one byte to each peer."""
    return TimedAllToAll.of(group, 1, device).seconds(MANY * repetitions)


def bandwidth(group: dist.ProcessGroup, device: torch.device, repetitions: int) -> float:
    """Bytes per second that a rank sends while it receives as many."""
    seconds = moved = 0.0
    for size in BYTES[device.type]:
        exchange = TimedAllToAll.of(group, size, device)
        seconds += exchange.seconds(repetitions)
        moved += sum(exchange.splits)
    return moved / seconds


def link_of(latency: float, pair: float, ranks: int, rate: float) -> Link:
    """The link that explains two measurements of the smallest all-to-all.

    Args:
        latency: seconds of it among all `ranks`.
        pair: seconds of it between two of them.
        ranks: 2 or more.
        rate: bytes per second that a rank sends.
    """
    if ranks == 2:
        return Link(rate, pair)
    per_peer = max(0.0, (latency - pair) / (ranks - 2))
    return Link(rate, max(0.0, pair - per_peer), per_peer)
