"""Times on a GPU that can be compared: variants in turn, beside what the device does at its best in the same minute."""

from __future__ import annotations

import contextlib
import math
import shutil
import statistics
import subprocess
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from canzona_compile.tools.calibration.clock import Clock, Work

HEAD_START = 40_000_000  # cycles, 20 ms of an H200: longer than the host takes to launch a stage of a step
CYCLES = 3e9  # in a second, at most: how far ahead the host has to be
LEAST = 3  # calls of a sample


@dataclass(frozen=True, slots=True)
class Extent:
    """How much is measured. `dry` shrinks all of it, so that every line runs in seconds on a CPU."""

    dry: bool

    @property
    def shortest(self) -> float:
        """Seconds of a sample."""
        return 1e-4 if self.dry else 2e-2

    @property
    def rounds(self) -> int:
        return 2 if self.dry else 9

    @property
    def compiler(self) -> str:
        """The backend of torch.compile; without a GPU it would build C++ for minutes."""
        return "aot_eager" if self.dry else "inductor"

    def size(self, n: int) -> int:
        """A dim of a matrix."""
        return max(16, n // 512) if self.dry else n

    def count(self, n: int) -> int:
        return min(n, 2) if self.dry else n


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What the device does at its best: products in TFLOP/s, copies in TB/s read and written."""

    bf16: float
    fp16: float
    bandwidth: float

    @classmethod
    def measure(cls, clock: Clock, extent: Extent) -> Ceilings:
        n = extent.size(8192)
        rates = []
        for dtype in (torch.bfloat16, torch.float16):
            a, b = (torch.randn(n, n, device=clock.device, dtype=dtype) for _ in range(2))
            out = torch.empty_like(a)
            rates.append(2 * n**3 / best(clock, lambda a=a, b=b, out=out: torch.mm(a, b, out=out)) / 1e12)  # type: ignore[misc]
        size = 2**16 if extent.dry else 2**31
        source = torch.randn(size // 4, device=clock.device)  # zeros may be faster
        target = torch.empty_like(source)
        moved = 2 * size / best(clock, lambda: target.copy_(source)) / 1e12
        return cls(rates[0], rates[1], moved)


def best(clock: Clock, work: Work) -> float:
    """Seconds of the fastest of a few samples."""
    for _ in range(2):
        work()
    return min(clock.sample(work, 3) for _ in range(4))


def alone(clock: Clock, work: Work, repeats: int = 1, cycles: int = HEAD_START) -> float:
    """Seconds that a device takes for one `work`, not the host: that has told it all before the device begins.

    Args:
        cycles: of the device, in which the host launches everything.
    """
    if clock.device.type != "cuda":
        return clock.sample(work, repeats)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(clock.device)
    torch.cuda._sleep(cycles)
    begin.record()
    for _ in range(repeats):
        work()
    end.record()
    torch.cuda.synchronize(clock.device)
    return float(begin.elapsed_time(end)) / 1e3 / repeats


class Watched:
    """Clocks and power of a device while something is measured, as nvidia-smi says them ten times a second.

    Attributes:
        seen: MHz of the multiprocessors, and watts; empty without nvidia-smi.
    """

    QUERY = ("nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits")

    def __init__(self, device: torch.device) -> None:
        self.seen: list[tuple[float, float]] = []
        self._over = threading.Event()
        self._wanted = device.type == "cuda" and shutil.which(self.QUERY[0]) is not None
        # nvidia-smi numbers devices in its own way.
        uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None) if self._wanted else None
        command = (*self.QUERY, *([f"--id=GPU-{uuid}"] if uuid else []))
        self._thread = threading.Thread(target=self._watch, args=(command,), daemon=True)

    def _watch(self, command: Sequence[str]) -> None:
        while not self._over.wait(0.1):
            said = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split(",")
            with contextlib.suppress(ValueError, IndexError):  # it may say that it sees no device
                self.seen.append((float(said[0]), float(said[1])))

    def __enter__(self) -> Watched:
        if self._wanted:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._wanted:
            self._thread.join()

    def figures(self) -> dict[str, list[float]]:
        """The least, the median and the largest value of each."""
        columns = dict(zip(("MHz", "watts"), zip(*self.seen, strict=True), strict=False))
        return {name: [min(own), statistics.median(own), max(own)] for name, own in columns.items()}


@contextlib.contextmanager
def going_on(what: str, problems: list[str]) -> Iterator[None]:
    """An error within is a problem to report, and no reason to measure nothing else."""
    try:
        yield
    except Exception as error:
        traceback.print_exc()
        problems.append(f"{what}: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}")


def in_turn(clock: Clock, variants: Mapping[str, Work], extent: Extent) -> dict[str, list[float]]:
    """Seconds of every variant in each round. Clocks and heat change; within a round they hardly do."""
    repeats, ahead = {}, {}
    for name, work in variants.items():
        for _ in range(3):
            began = time.perf_counter()
            work()
        ahead[name] = time.perf_counter() - began  # of the host, if it waits for nothing
        repeats[name] = max(LEAST, min(200, math.ceil(extent.shortest / max(clock.sample(work, 1), 1e-7))))
    found: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(extent.rounds):
        for name, work in variants.items():
            cycles = max(HEAD_START, int(CYCLES * ahead[name] * repeats[name]))
            found[name].append(alone(clock, work, repeats[name], cycles))
    return found


def compared(seconds: Mapping[str, list[float]], baseline: str) -> dict[str, Any]:
    """By variant: the median time, and how many times as fast as the baseline, with quartiles over rounds."""
    result = {}
    for name, own in seconds.items():
        ratios = sorted(b / s for b, s in zip(seconds[baseline], own, strict=True))
        low, high = (ratios[0], ratios[-1]) if len(ratios) < 4 else statistics.quantiles(ratios, n=4)[::2]
        result[name] = {
            "seconds": statistics.median(own),
            "ratio": statistics.median(ratios),
            "quartiles": [low, high],
        }
    return result


def plain(ceilings: Ceilings) -> dict[str, float]:
    return asdict(ceilings)
