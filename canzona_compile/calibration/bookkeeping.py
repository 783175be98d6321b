"""What a step costs a rank's processor beside its program: gradients and state looked up, code asked for."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import Module, Parameter
from torch.optim import Muon

from canzona_compile.wrapper import wrap

SIDE = 16  # of the matrices: next to nothing to compute
COUNTS = (16, 64)  # of matrices, between which the slope is taken
STEPS = 4  # times as many as repetitions of other measurements: one takes milliseconds


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


def bookkeeping(mesh: DeviceMesh, repetitions: int) -> float:
    """Seconds per matrix and step: by how much a step with more matrices is longer outside of its program.

    The matrices are sharded over `mesh` as `fully_shard` does; all of its ranks call this.
    """
    few, many = (outside(mesh, count, STEPS * repetitions) for count in COUNTS)
    return max(0.0, (many - few) / (COUNTS[1] - COUNTS[0]))


def outside(mesh: DeviceMesh, matrices: int, repetitions: int) -> float:
    """Median CPU seconds of a steady step that are not its program's."""

    def zeros() -> torch.Tensor:
        return distribute_tensor(torch.zeros(SIDE, SIDE), mesh, [Shard(0)], src_data_rank=None)

    params = [Parameter(zeros()) for _ in range(matrices)]
    optimizer: Any = wrap(Muon(params, lr=0.0), strategy="owner")
    for param in params:
        param.grad = zeros()
    optimizer.step()
    optimizer.step()  # from now on the program is the same
    program = Stopwatch(optimizer.canzona.step.program.module)
    samples = []
    for _ in range(repetitions):
        start = time.thread_time()
        optimizer.step()
        samples.append(time.thread_time() - start - program.seconds)
    return statistics.median(samples)
