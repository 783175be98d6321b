"""Measures a rank's bookkeeping in a step beside its program: looking up gradients and state, choosing the program."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import Module, Parameter
from torch.optim import Muon

from canzona_compile.api.wrap import wrap
from canzona_compile.tools.calibration.measure import clearing

MATRICES = 64
SIDE = 16  # rows and columns of each matrix: there is next to nothing to compute


class Stopwatch:
    """CPU seconds of the calling thread between the begin of a module's call and its end."""

    def __init__(self, module: Module) -> None:
        self.begin = self.seconds = 0.0
        module.register_forward_pre_hook(self.before)
        module.register_forward_hook(self.after)

    def before(self, *_: object) -> None:
        self.begin = time.thread_time()

    def after(self, *_: object) -> None:
        self.seconds = time.thread_time() - self.begin


def bookkeeping(mesh: DeviceMesh, cold: int, repetitions: int) -> float:
    """Measure the CPU seconds of a steady step that its program does not take, by matrix.

    Args:
        mesh: one dim; the matrices are sharded over it as `fully_shard` does, and all of its ranks call this.
        cold: bytes of other data that the rank goes through before each step, to clear its caches.
        repetitions: how many steps the median is taken over.
    """

    def zeros() -> torch.Tensor:
        return distribute_tensor(torch.zeros(SIDE, SIDE, device="cpu"), mesh, [Shard(0)], src_data_rank=None)

    params = [Parameter(zeros()) for _ in range(MATRICES)]
    optimizer: Any = wrap(Muon(params, lr=0.0), strategy="owner")
    for param in params:
        param.grad = zeros()
    optimizer.step()
    optimizer.step()  # from now on the program is the same
    program = Stopwatch(optimizer.canzona.step.program.module)
    before = clearing(cold, torch.device("cpu"))
    samples = []
    for _ in range(repetitions):
        before()
        start = time.thread_time()
        optimizer.step()
        samples.append(time.thread_time() - start - program.seconds)
    return statistics.median(samples) / MATRICES
