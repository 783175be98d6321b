"""How far the clocks of ranks are apart: each rank asks the first one what time it is."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

ROUNDS = 20  # of which the fastest counts
HOW = "each rank asks rank 0 for its time, and takes the fastest of 20 answers as of half-way"


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """The clock of the first rank less that of this one.

    Attributes:
        seconds: the difference.
        bound: seconds by which it may be wrong: half the time that the answer took.
    """

    seconds: float
    bound: float


def offset_to_first() -> ClockOffset:
    """Compare the clock of this rank with that of rank 0, one rank after the other. A collective of all ranks."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    best = ClockOffset(0.0, 0.0 if rank == 0 else float("inf"))
    for other in range(1, ranks):
        dist.barrier()
        for _ in range(ROUNDS if rank in (0, other) else 0):
            if rank == 0:
                asked = torch.zeros(1, dtype=torch.float64, device="cpu")
                dist.recv(asked, other)
                dist.send(torch.tensor([time.perf_counter()], dtype=torch.float64, device="cpu"), other)
                continue
            answer = torch.zeros(1, dtype=torch.float64, device="cpu")
            begin = time.perf_counter()
            dist.send(torch.zeros(1, dtype=torch.float64, device="cpu"), 0)
            dist.recv(answer, 0)
            end = time.perf_counter()
            if (end - begin) / 2 < best.bound:
                best = ClockOffset(float(answer) - (begin + end) / 2, (end - begin) / 2)
    return best
