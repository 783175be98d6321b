"""The dummy step that torch.distributed.checkpoint takes with a new optimizer, to learn the form of its state.

Torch's `_init_optim_state` sets all gradients and every lr to zero and calls `step`. After that a plain optimizer
has counted one step, and SOAP has used up the step that only finds its basis. A wrapped optimizer has state after
the dummy step and is otherwise unchanged. Its next step drops that state unless a checkpoint was loaded into it.
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
from canzona_compile.replica.randomness import devices_among


def is_dummy_step(optimizer: Optimizer) -> bool:
    """Tell whether the step that is about to be taken is a dummy step.

    Zero gradients and a zero lr do not decide this. A warm-up from lr 0, of a model whose last layer is initialised
    with zeros, also begins with such a step, and that step counts. The call `step(closure=None)` does not decide it
    either, because any user may write it. So this looks for a caller with the name of torch's function. Copies of
    that function in training frameworks have kept the name.

    Torch could make this unnecessary with a method of `Optimizer` that creates state without a step, or with a mark
    on the step that `_init_optim_state` takes.
    """
    if optimizer.state:
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not frame.f_code.co_name.endswith("init_optim_state"):
        frame = frame.f_back
    # Look at the lrs last: the host would wait for an lr that is a tensor on a device.
    return frame is not None and all(group.get("lr", 0.0) == 0.0 for group in optimizer.param_groups)


@contextlib.contextmanager
def undone(optimizer: Optimizer) -> Iterator[None]:
    """Allow a step inside this context, and undo it on exit except for the state of parameters.

    Inside the context each lr has its default value. Otherwise code that depends on hyperparameters would be captured
    for an lr of zero, and no later step would use that capture.
    """
    params = [local_part(p) for group in optimizer.param_groups for p in group["params"]]
    values = [p.detach().clone() for p in params]
    homes = [vars(optimizer), *optimizer.param_groups]
    before = [dict(home) for home in homes]
    rate = optimizer.defaults.get("lr")
    for group in optimizer.param_groups if isinstance(rate, float | Tensor) else ():
        group["lr"] = rate
    try:
        with torch.random.fork_rng(devices=devices_among(params)):
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
