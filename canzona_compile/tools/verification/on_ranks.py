"""A user's model on the ranks of `verify` and `profile`: how they share it, and how gradients come to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from canzona_compile.api.wrap import wrap
from canzona_compile.api.zero1 import zero1
from canzona_compile.tools.verification.layouts import LayoutName, like, shard
from canzona_compile.tools.verification.user_model import Built


def share(made: Built, layout: LayoutName, options: Mapping[str, Any]) -> None:
    """Share a model among the ranks of the default process group, and wrap its optimizer.

    Args:
        made: plain, and the same on every rank.
        layout: how the ranks share each parameter.
        options: of `wrap`; under "zero1", of `zero1`.
    """
    if layout == "zero1":
        assert dist.group.WORLD is not None
        zero1(made.model, made.optimizer, mesh=dist.group.WORLD, **options)
    else:
        wrap(made.optimizer, replicate=shard(made.optimizer, layout), **options)


def give(made: Built, layout: LayoutName, grads: Sequence[Tensor | None]) -> None:
    """Give each parameter its gradient, as a backward pass leaves it.

    Args:
        made: the model on the ranks.
        layout: how they share it.
        grads: whole gradients, equal on all ranks; None where there is none.
    """
    for param in made.params:
        param.grad = None
    found = [(param, grad) for param, grad in zip(made.params, grads, strict=True) if grad is not None]
    if layout != "zero1":
        for param, grad in found:
            param.grad = like(grad, param)
        return
    # Ranks average their gradients. The mean of equal ones may round; that of a multiple and zeros does not, if the
    # number of ranks is a power of two.
    ranks, first = dist.get_world_size(), dist.get_rank() == 0
    shares = [grad * ranks if first else torch.zeros_like(grad).copysign(grad) for _, grad in found]
    torch.autograd.backward([param for param, _ in found], shares)
