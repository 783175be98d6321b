"""The step that torch.distributed.checkpoint takes with a fresh optimizer, to see what its state looks like.

Torch's `_init_optim_state` sets all gradients and every lr to zero and calls `step`. A plain optimizer has
counted a step then, and SOAP has used up the step that only finds its basis. A wrapped optimizer has state
afterwards, and is as it was in every other respect. The next step forgets that state unless it was loaded.
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
    """Is the step that is about to be taken a dummy step?

    Zeros alone do not tell: a warm-up from lr 0 of a model whose last layer is initialised with zeros begins
    with such a step as well, and that one counts. The call itself is that of any user too, `step(closure=None)`.
    So the caller decides, by its name, which copies of torch's function in training frameworks have kept.

    Torch could make this unnecessary with a method of `Optimizer` that creates state without a step, or with a mark
    on the step that `_init_optim_state` takes.
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
    """While open, a step may be taken; afterwards everything but the state of parameters is as it was before.

    Each lr is the default one meanwhile. Otherwise code that depends on hyperparameters would be captured for a lr of
    zero, and nobody would use that capture again.
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
