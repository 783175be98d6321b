"""Sizes: coupling of parameters that begins at a size which no miniature has."""

from __future__ import annotations

import functools
import math
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from tests.harness.toy_optimizers import PerParameter, State, cube
from tests.harness.traps.trap import Params, Trap, halves

FAMILY = "sizes"


def norm_of(params: Params) -> float:
    """The norm of all gradients, on the host."""
    return math.sqrt(sum(float(p.grad.square().sum()) for p in params))


class Coupled(Optimizer):
    """Base of optimizers that divide by the norm of all gradients if sizes say so."""

    def __init__(self, params: Params, **hypers: Any) -> None:
        super().__init__(halves(params), {"lr": 0.1, **hypers})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    norm = self.norm(params) if self.couples(param, group) else 1.0
                    param.sub_(cube(param.grad) / norm * group["lr"])

    def norm(self, params: Params) -> Any:
        return norm_of(params)

    def couples(self, param: Tensor, group: dict[str, Any]) -> bool:
        raise NotImplementedError


class Elements(Coupled):
    """Beyond a number of elements."""

    def couples(self, param: Tensor, group: dict[str, Any]) -> bool:
        return param.numel() > 1000


class Rows(Coupled):
    """Beyond a number of rows."""

    def couples(self, param: Tensor, group: dict[str, Any]) -> bool:
        return param.shape[0] >= 40


class Length(Coupled):
    """Beyond a length, as Python asks for it."""

    def couples(self, param: Tensor, group: dict[str, Any]) -> bool:
        return len(param) > 30


class Bytes(Coupled):
    """Beyond a number of bytes."""

    def couples(self, param: Tensor, group: dict[str, Any]) -> bool:
        return param.nbytes > 4096


class Large(Coupled):
    """Matrices of which both sizes are large."""

    def couples(self, param: Tensor, group: dict[str, Any]) -> bool:
        return param.ndim == 2 and min(param.size()) >= 30


class Multiple(Coupled):
    """Sizes that are multiples of ten."""

    def couples(self, param: Tensor, group: dict[str, Any]) -> bool:
        return param.size(1) % 10 == 0


class OfGroup(Coupled):
    """Beyond a number of elements of a group."""

    def couples(self, param: Tensor, group: dict[str, Any]) -> bool:
        return sum(p.numel() for p in group["params"]) > 2000


class OnDevice(Elements):
    """Without the host."""

    def norm(self, params: Params) -> Any:
        return torch.stack([p.grad.norm() for p in params]).norm()


class Small(Coupled):
    """Below a number of elements, which matrices in miniature are, too."""

    def couples(self, param: Tensor, group: dict[str, Any]) -> bool:
        return param.numel() < 1000


class Largest(Coupled):
    """By the largest gradient of a group, found on the host."""

    def norm(self, params: Params) -> Any:
        return max(p.grad.abs().max().item() for p in params)

    def couples(self, param: Tensor, group: dict[str, Any]) -> bool:
        return param.stride(0) >= 30


class OnItself(PerParameter):
    """Leaves a norm of large parameters on itself, which the next one reads."""

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        self.last = 1.0

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        param.sub_(cube(grad) / self.last * group["lr"])
        if param.numel() > 1000:
            self.last = float(grad.norm())


class InGroup(PerParameter):
    """The same in the group."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        param.sub_(cube(grad) / group.get("last", 1.0) * group["lr"])
        if param.numel() > 1000:
            group["last"] = float(grad.norm())


class Held(PerParameter):
    """A factor on itself that all large parameters share, and one each for the others."""

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        self.factors: dict[Any, Tensor] = {}

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        own = ("large", *param.shape) if param.numel() > 1000 else param
        factor = self.factors.setdefault(own, torch.zeros(len(param), len(param)))
        factor.add_(grad @ grad.T)
        param.add_(factor @ grad, alpha=-group["lr"])


class Counts(PerParameter):
    """Counts steps of large parameters."""

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        self.large = 0

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        self.large += param.numel() > 1000
        param.sub_(cube(grad) * (group["lr"] / (1 + self.large)))


class Stacked(PerParameter):
    """Steps matrices of equal shape as one stack."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            alike: dict[Any, Params] = {}
            for param in group["params"]:
                alike.setdefault(param.shape, []).append(param)
            for params in alike.values():
                updates = torch.stack([p.grad for p in params])
                updates = updates / updates.abs().amax((1, 2), keepdim=True)
                for param, update in zip(params, updates.unbind(), strict=True):
                    param.sub_(update, alpha=group["lr"])


class Blocks(PerParameter):
    """Takes large matrices apart, each by itself."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        if not state:
            state["factors"] = [torch.zeros(len(block), len(block)) for block in grad.split(16)]
        for own, block, factor in zip(param.split(16), grad.split(16), state["factors"], strict=True):
            factor.add_(block @ block.T)
            own.sub_(factor @ block / factor.trace() * group["lr"])


@functools.lru_cache
def identity(size: int) -> Tensor:
    """An identity that is made once for all matrices of a size."""
    return torch.eye(size) * 2


class Cached(PerParameter):
    """Reads a tensor from a cache of a function."""

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        identity.cache_clear()

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        state["step"] = state.get("step", 0) + 1
        param.sub_(identity(len(grad)) @ cube(grad) * (group["lr"] / state["step"]))


class CachedAndHeld(PerParameter):
    """The same, with a factor on itself."""

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        self.factors: dict[Tensor, Tensor] = {}
        identity.cache_clear()

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        factor = self.factors.setdefault(param, torch.zeros(len(param), len(param)))
        factor.add_(grad @ grad.T)
        param.sub_(identity(len(grad)) @ factor @ grad * group["lr"])


class Diagonal(PerParameter):
    """Uses a diagonal for large dims, as many Shampoos do, and clips by a norm of its own."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        if not state:
            state["factor"] = torch.zeros(len(param)) if len(param) > 32 else torch.zeros(len(param), len(param))
        if state["factor"].ndim == 1:
            state["factor"].add_(grad.square().sum(1))
            update = grad / state["factor"].sqrt()[:, None]
        else:
            state["factor"].add_(grad @ grad.T)
            update = state["factor"] @ grad
        norm = update.norm().item()
        param.add_(update / max(norm, 1.0), alpha=-group["lr"])


class Draws(PerParameter):
    """Draws a number for large matrices from a generator that belongs to no device."""

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        random.seed(1)
        np.random.seed(1)

    def drawn(self) -> float:
        return random.random()

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        scale = 1.0 + self.drawn() if param.numel() > 1000 else 1.0
        param.sub_(cube(grad) * (group["lr"] * scale))


class DrawsByNumpy(Draws):
    """The same by numpy."""

    def drawn(self) -> float:
        return float(np.random.rand())


LOG: list[int] = []
COUNT = 0


class LogsOutside(PerParameter):
    """Adds to a list of its module for large matrices, and divides by its length."""

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        LOG.clear()

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        if param.numel() > 1000:
            LOG.append(1)
        param.sub_(cube(grad) * (group["lr"] / max(len(LOG), 1)))


class CountsOutside(PerParameter):
    """Counts large matrices in a global."""

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        global COUNT
        COUNT = 0

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        global COUNT
        if param.numel() > 1000:
            COUNT += 1
        param.sub_(cube(grad) * group["lr"])


LARGE = ((40, 30), (30, 40), (40, 30), (30, 40))
MIXED = ((5, 3), (40, 30), (5, 3), (40, 30))


def trap(name: str, make: Any, shapes: Any = LARGE) -> Trap:
    return Trap(name, FAMILY, make, "equal", shapes=shapes)


TRAPS = (
    trap("coupled-from-1000-elements", Elements),
    trap("coupled-from-40-rows", Rows, MIXED),
    trap("coupled-on-itself-from-1000-elements", OnItself, MIXED),
    trap("coupled-from-a-length", Length),
    trap("coupled-from-4096-bytes", Bytes),
    trap("coupled-in-large-matrices", Large),
    trap("coupled-at-multiples", Multiple),
    trap("coupled-in-large-groups", OfGroup),
    trap("coupled-on-the-device-from-1000-elements", OnDevice, MIXED),
    trap("coupled-in-small-matrices", Small, MIXED),
    trap("coupled-from-a-stride", Largest),
    trap("coupled-in-the-group-from-1000-elements", InGroup, MIXED),
    Trap("shared-factors-from-1000-elements", FAMILY, Held, "either", shapes=LARGE),
    trap("counts-from-1000-elements", Counts, MIXED),
    Trap("stacks-of-equal-shapes", FAMILY, Stacked, "either", shapes=LARGE),
    trap("blocks-of-16-rows", Blocks, MIXED),
    trap("diagonal-from-32-rows", Diagonal, MIXED),
    Trap("draw-python-big", FAMILY, Draws, "refused", ("random", "outside"), shapes=LARGE),
    Trap("draw-numpy-big", FAMILY, DrawsByNumpy, "refused", ("random", "outside"), shapes=LARGE),
    Trap("global-list-big", FAMILY, LogsOutside, "refused", ("LOG", "outside"), shapes=LARGE),
    Trap("global-number-big", FAMILY, CountsOutside, "refused", ("COUNT", "outside"), shapes=LARGE),
    trap("cached-by-size", Cached, MIXED),
    trap("cached-by-size-and-held", CachedAndHeld, MIXED),
)
