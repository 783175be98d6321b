"""How long a piece of work takes: of a processor on CPU, of the current stream's device on CUDA."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from timeit import Timer

import torch

Work = Callable[[], object]

NO_CUDA = "no CUDA"
SHORTEST = 2e-3  # seconds of a sample: shorter work is repeated within it
MOST_REPEATS = 10_000
GRAPH, MOST_CALLS = 5e-4, 8  # seconds of a graph, and calls in it
WARM_UP = 3  # on CUDA, where first calls load kernels and wake the clocks


@dataclass(frozen=True, slots=True)
class Clock:
    """Times work on a device.

    On CPU it counts the time that the calling thread has a core: jobs beside it that take the core away do not count,
    what they do to caches and to memory does. On CUDA it counts from one event of the current stream to another.

    Attributes:
        repetitions: samples of which `seconds` is the median.
    """

    device: torch.device
    repetitions: int

    @property
    def how(self) -> str:
        """In words, for the sources of rates."""
        kind = "CUDA events" if self.device.type == "cuda" else "CPU time of a thread"
        return f"{kind}, median of {self.repetitions}"

    def seconds(self, work: Work, before: Work | None = None) -> float:
        """The median time of one `work`, in seconds.

        Args:
            before: runs once before each sample and is not timed; `work` runs once per sample then, otherwise as often
                as fits in `SHORTEST`.
        """
        for _ in range(WARM_UP if self.device.type == "cuda" else 1):
            work()
        repeats = 1 if before else min(MOST_REPEATS, math.ceil(SHORTEST / max(self.sample(work, 1), 1e-9)))
        return statistics.median(self.sample(work, repeats, before) for _ in range(self.repetitions))

    def recorded(self, work: Work) -> tuple[Work, int, str]:
        """The work as steps replay it, from a CUDA graph; as it is on CPU, or where that cannot be.

        To launch a small product takes the host longer than the device, and ours longer than the library's. A graph
        takes a few microseconds as well, so there are several calls in it if they are short.

        Returns:
            What replays it, how many calls that are, and why it is no graph.
        """
        self.sample(work, 1)  # compiles
        calls = min(MOST_CALLS, math.ceil(GRAPH / max(self.sample(work, 1), 1e-9)))
        replay, why = graphed(lambda: [work() for _ in range(calls)], self.device)
        return replay, calls, why

    def sample(self, work: Work, repeats: int, before: Work | None = None) -> float:
        """The mean time of one `work` of `repeats` in a row, in seconds, after an untimed `before`."""
        if self.device.type != "cuda":
            return Timer(work, before or "pass", timer=time.thread_time).timeit(repeats) / repeats
        if before is not None:
            before()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(self.device)
        begin.record()
        for _ in range(repeats):
            work()
        end.record()
        torch.cuda.synchronize(self.device)
        return float(begin.elapsed_time(end)) / 1e3 / repeats


def graphed(work: Work, device: torch.device) -> tuple[Work, str]:
    """The work as a CUDA graph, so that its launches take no time; as it is, and why, where that cannot be."""
    if device.type != "cuda":
        return work, NO_CUDA
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(2):
            work()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            work()
    except RuntimeError as error:
        return work, str(error).splitlines()[0]
    return graph.replay, ""
