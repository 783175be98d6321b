"""What becomes of each parameter of a chain while a script trains it."""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from canzona_compile.api.chain import Chain
from canzona_compile.compat.optimizer_class import plain_class


class Trained(NamedTuple):
    """A parameter after the last step.

    Attributes:
        by: the class of its optimizer.
        changed: whether it is another one than after the first step.
        sharded: whether it is a DTensor.
        bits: its value, in short.
    """

    by: str
    changed: bool
    sharded: bool
    bits: str


class WatchedChains:
    """Follows the steps of chains, wrapped or not, by a hook of torch for all optimizers.

    The hook comes after steps: after one before them, wrapped chains look at their gradients once more.

    Attributes:
        trained: what became of each parameter that has a name in its group, by name.
    """

    def __init__(self) -> None:
        self.trained: dict[str, Trained] = {}
        self._first: dict[str, str] = {}
        self._handle = register_optimizer_step_post_hook(self._after_step)

    def __enter__(self) -> WatchedChains:
        return self

    def __exit__(self, *error: object) -> None:
        self._handle.remove()

    def _after_step(self, chain: Any, args: Any, kwargs: Any) -> None:
        if not isinstance(chain, Chain):
            return
        for optimizer in chain.optimizers:
            for group in optimizer.param_groups:
                named = zip(group["param_names"], group["params"], strict=True) if "param_names" in group else ()
                for name, param in named:
                    found = digest(param)
                    changed = self._first.setdefault(name, found) != found
                    self.trained[name] = Trained(plain_class(optimizer).__name__, changed, is_sharded(param), found)


def is_sharded(param: Tensor) -> bool:
    return isinstance(param, DTensor)


def digest(param: Any) -> str:
    """The bits of a parameter, in short. A collective if it is sharded."""
    value = param.detach().full_tensor() if is_sharded(param) else param.detach()
    return hashlib.sha256(value.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
