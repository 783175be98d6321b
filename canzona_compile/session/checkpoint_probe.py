"""The step that torch.distributed.checkpoint takes with a fresh optimizer, to see what its state looks like.

Torch's `_init_optim_state` sets all gradients and every lr to zero and calls `step`. A plain optimizer has
counted a step then, and SOAP has used up the one that only finds its basis. A wrapped one has state
afterwards, and is as it was in every other respect; the state counts for nothing unless it is loaded.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import FrameType

import torch
from torch import Tensor
from torch.optim import Optimizer

from canzona_compile.ir.layout import local_part


def is_dummy_step(optimizer: Optimizer) -> bool:
    """Is the step that is about to be taken one of these?

    Zeros alone do not tell: a warm-up from lr 0 of a model whose last layer is initialised with zeros begins
    with such a step as well, and that one counts. So it depends on who calls. Copies of torch's function in
    training frameworks have kept its name.
    """
    if optimizer.state:
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not frame.f_code.co_name.endswith("init_optim_state"):
        frame = frame.f_back
    # The rates last: one that is a tensor on a device would let the host wait.
    return frame is not None and all(group.get("lr", 0.0) == 0.0 for group in optimizer.param_groups)


@contextlib.contextmanager
def undone(optimizer: Optimizer) -> Iterator[None]:
    """What a step does meanwhile to anything but the state of parameters is undone.

    Each lr is meanwhile the default one: code that is steered by hyperparameters is captured for a lr of zero
    apart, and nobody would use that capture again.
    """
    params = [local_part(p) for group in optimizer.param_groups for p in group["params"]]
    values = [p.detach().clone() for p in params]
    homes = [vars(optimizer), *optimizer.param_groups]
    before = [dict(home) for home in homes]
    rate = optimizer.defaults.get("lr")
    for group in optimizer.param_groups if isinstance(rate, float | Tensor) else ():
        group["lr"] = rate
    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            yield
    finally:
        for home, old in zip(homes, before, strict=True):
            for name in home.keys() - old.keys():
                del home[name]
            home.update(old)
        for key in [key for key in optimizer.state if not isinstance(key, Tensor)]:
            del optimizer.state[key]
        with torch.no_grad():
            for param, value in zip(params, values, strict=True):
                param.copy_(value)
