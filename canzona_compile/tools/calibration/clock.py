"""How long a piece of work takes: of a processor on CPU, of the current stream on CUDA."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

Work = Callable[[], object]

SHORTEST = 2e-3  # seconds of a sample: shorter work is repeated within it
MOST_REPEATS = 10_000
WARM_UP = 3  # on CUDA, where first calls load kernels and wake the clocks


@dataclass(frozen=True, slots=True)
class Clock:
    """Times work on a device.

    On CPU it counts the time that the calling thread has a core: jobs beside it that take the core away do not count,
    what they do to caches and to memory does. On CUDA it counts from one event of the current stream to another.
    """

    device: torch.device
    repetitions: int

    @property
    def how(self) -> str:
        """In words, for the sources of rates."""
        kind = "CUDA events" if self.device.type == "cuda" else "CPU time of a thread"
        return f"{kind}, median of {self.repetitions}"

    def seconds(self, work: Work, before: Work | None = None) -> float:
        """The median time of one `work`; with `before`, that is done before each, untimed."""
        for _ in range(WARM_UP if self.device.type == "cuda" else 1):
            work()
        repeats = 1 if before else min(MOST_REPEATS, math.ceil(SHORTEST / max(self.sample(work, 1), 1e-9)))
        samples = []
        for _ in range(self.repetitions):
            if before is not None:
                before()
            samples.append(self.sample(work, repeats))
        return statistics.median(samples)

    def sample(self, work: Work, repeats: int) -> float:
        """The mean time of one `work` of so many in a row."""
        if self.device.type == "cuda":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize(self.device)
            begin.record()
            for _ in range(repeats):
                work()
            end.record()
            torch.cuda.synchronize(self.device)
            return float(begin.elapsed_time(end)) / 1e3 / repeats
        start = time.thread_time()
        for _ in range(repeats):
            work()
        return (time.thread_time() - start) / repeats
