"""What a step asks of its process: cached functions, addresses, strides, the environment."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

import tests.harness
from tests.harness.toy_optimizers import PerParameter, State, cube
from tests.harness.traps.trap import DDP, PLAIN, Params, Trap

FAMILY = "asking"
VARIABLE = "CANZONA_TRAP_HABIT"

# -- caches ------------------------------------------------------------------------------------------

MADE: list[Any] = []
RATE = [1.0]


@functools.lru_cache
def number_of(shape: Any) -> float:
    MADE.append(shape)
    return 1.0 / len(MADE)


@functools.cache
def identity(size: int) -> Tensor:
    return torch.eye(size)


@functools.lru_cache
def buffer(shape: Any) -> Tensor:
    return torch.zeros(shape)


@functools.lru_cache
def rate() -> float:
    return RATE[0]


@functools.lru_cache
def root(number: int) -> float:
    return float(number**-0.5)


class Cached(PerParameter):
    """Base of optimizers that call functions whose results are kept."""

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        for function in (number_of, identity, buffer, rate):
            function.cache_clear()
        MADE.clear()
        RATE[0] = 1.0


class CachedPure(Cached):
    """A number of a number."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        param.add_(cube(grad), alpha=-group["lr"] * root(len(param)))


class CachedEffect(Cached):
    """The function counts its calls."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        param.add_(cube(grad), alpha=-group["lr"] * number_of(tuple(param.shape)))


class CachedTensor(Cached):
    """The function gives a tensor, which nobody writes."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        if not state:
            state["average"] = torch.zeros_like(param)
        state["average"].lerp_(grad, 0.1)
        param.add_(identity(len(param)) @ cube(state["average"]), alpha=-group["lr"])


class CachedBuffer(Cached):
    """The function gives a tensor by shape, which parameters of that shape write."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        shared = buffer(tuple(param.shape))
        shared.lerp_(grad, 0.1)
        param.add_(cube(shared), alpha=-group["lr"])


class CachedRate(Cached):
    """The function keeps what it read first, whatever becomes of it."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        param.add_(cube(grad), alpha=-group["lr"] * rate())


class CachedMethod(Cached):
    """A method counts its calls."""

    made = 0

    @functools.lru_cache  # noqa: B019 - a trap
    def scale(self, shape: Any) -> float:
        self.made += 1
        return 1.0 / self.made

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        param.add_(cube(grad), alpha=-group["lr"] * self.scale(tuple(param.shape)))


def kept_in_dict(function: Any) -> Any:
    """A decorator that keeps results in a dict of its own."""
    results: dict[Any, Any] = {}

    @functools.wraps(function)
    def known(size: int) -> Any:
        if size not in results:
            results[size] = function(size)
        return results[size]

    known.results = results  # type: ignore[attr-defined]
    return known


@kept_in_dict
def doubled(size: int) -> Tensor:
    return torch.eye(size) * 2


class KeptInDict(Cached):
    """The function keeps its tensors in a dict of its decorator."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        param.add_(doubled(len(param)) @ cube(grad), alpha=-group["lr"])


class CachedOnItself(Cached):
    """The cached function is an attribute."""

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        self.identity = identity

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        param.add_(self.identity(len(param)) @ cube(grad), alpha=-group["lr"])


class CachedInModule(Cached):
    """The cached function is found through modules."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        param.add_(tests.harness.traps.asking.identity(len(param)) @ cube(grad), alpha=-group["lr"])


# -- addresses, strides, the environment -------------------------------------------------------------


class AddressInSet(PerParameter):
    """Knows some parameters by their address, in a set."""

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        self.slow: Any = {p.data_ptr() for p in self.param_groups[0]["params"][:2]}

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        param.add_(cube(grad), alpha=-group["lr"] * (0.5 if param.data_ptr() in self.slow else 1.0))


class AddressInDict(AddressInSet):
    """The same in a dict."""

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        self.slow = dict.fromkeys(self.slow, 0.5)


class Asking(PerParameter):
    """Base of optimizers that ask how tensors lie in memory."""

    def asked(self, param: Tensor, grad: Tensor) -> bool:
        raise NotImplementedError

    def direction(self, grad: Tensor) -> Tensor:
        return cube(grad)

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        param.add_(self.direction(grad), alpha=-group["lr"] * (1.0 if self.asked(param, grad) else 0.5))


class ContiguousParameter(Asking):
    def asked(self, param: Tensor, grad: Tensor) -> bool:
        return param.is_contiguous()


class StrideOfParameter(Asking):
    def asked(self, param: Tensor, grad: Tensor) -> bool:
        return param.stride(-1) == 1


class ContiguousGradient(Asking):
    def asked(self, param: Tensor, grad: Tensor) -> bool:
        return grad.is_contiguous()


class StrideOfGradient(Asking):
    def asked(self, param: Tensor, grad: Tensor) -> bool:
        return grad.stride(-1) == 1


class ContiguousInVmap(PerParameter):
    """Asks inside of `torch.vmap`, where tensors have no memory that can be reached."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        rows = torch.vmap(lambda row: row if row.is_contiguous() else row.contiguous())(grad)
        param.add_(cube(rows), alpha=-group["lr"])


class ContiguousInGrad(PerParameter):
    """The same inside of `torch.func.grad`."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        slope = torch.func.grad(lambda own: (own if own.is_contiguous() else own.contiguous()).square().sum())(grad)
        param.add_(cube(slope), alpha=-group["lr"])


class ContiguousGradientElementwise(ContiguousGradient):
    def direction(self, grad: Tensor) -> Tensor:
        return grad


class ByVariable(PerParameter):
    """Reads a variable of the environment on every step."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        param.add_(cube(grad), alpha=-group["lr"] * float(os.getenv(VARIABLE, "1")))


class ByEntry(ByVariable):
    """The same by `os.environ`."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        param.add_(grad, alpha=-group["lr"] * float(os.environ.get(VARIABLE, "1")))


# -- what the user does ------------------------------------------------------------------------------


def lie_in_columns(value: Tensor, place: int) -> Tensor:
    """Every second parameter lies in columns."""
    return value.t().contiguous().t() if place % 2 else value


def turn_gradients(first: int) -> Callable[[Any, Params, int], None]:
    """An edit: from a step on, every second gradient lies in columns."""

    def edit(optimizer: Any, params: Params, step: int) -> None:
        for param in params[1::2] if step >= first else ():
            grad, own = param.grad, {}
            if isinstance(grad, DTensor):
                own = {"shape": grad.shape, "stride": grad.stride()}
                mesh, placements, grad = grad.device_mesh, grad.placements, grad.to_local()
            turned = grad.t().contiguous().t()
            param.grad = DTensor.from_local(turned, mesh, placements, run_check=False, **own) if own else turned

    return edit


def set_rate(optimizer: Any, params: Params, step: int) -> None:
    if step == 2:
        RATE[0] = 2.0


def set_variable(optimizer: Any, params: Params, step: int) -> None:
    os.environ[VARIABLE] = "2" if step >= 2 else "1"


TRAPS = (
    Trap("cache-of-numbers", FAMILY, CachedPure, "equal"),
    Trap("cache-with-effect", FAMILY, CachedEffect, "refused", ("MADE",)),
    Trap("cache-of-tensors", FAMILY, CachedTensor, "equal", shapes=((20, 12), (12, 20))),
    Trap("cache-of-a-decorator", FAMILY, KeptInDict, "refused", ("results",), shapes=((20, 12), (12, 20))),
    Trap("cache-on-itself", FAMILY, CachedOnItself, "equal", shapes=((20, 12), (12, 20))),
    Trap("cache-in-a-module", FAMILY, CachedInModule, "equal", shapes=((20, 12), (12, 20))),
    Trap("cache-of-buffers", FAMILY, CachedBuffer, "equal"),
    Trap("cache-of-a-global", FAMILY, CachedRate, "equal", edit=set_rate),
    Trap("cache-of-a-method", FAMILY, CachedMethod, "refused", ("scale", "lru_cache")),
    Trap("address-in-set", FAMILY, AddressInSet, "refused", ("address",)),
    Trap("address-in-dict", FAMILY, AddressInDict, "refused", ("address",)),
    Trap(
        "contiguous-parameter",
        FAMILY,
        ContiguousParameter,
        "refused",
        ("strides",),
        start=lie_in_columns,
        layouts=(PLAIN, DDP),
    ),
    Trap(
        "stride-of-parameter",
        FAMILY,
        StrideOfParameter,
        "refused",
        ("strides",),
        start=lie_in_columns,
        layouts=(PLAIN, DDP),
    ),
    Trap("contiguous-gradient", FAMILY, ContiguousGradient, "refused", ("strides",), edit=turn_gradients(0)),
    Trap("contiguous-gradient-later", FAMILY, ContiguousGradient, "refused", ("strides",), edit=turn_gradients(2)),
    Trap("contiguous-gradient-never-turned", FAMILY, ContiguousGradient, "equal"),
    Trap("contiguous-inside-of-vmap", FAMILY, ContiguousInVmap, "equal"),
    Trap("contiguous-inside-of-grad", FAMILY, ContiguousInGrad, "equal"),
    Trap("stride-of-gradient", FAMILY, StrideOfGradient, "refused", ("strides",), edit=turn_gradients(0)),
    Trap(
        "contiguous-gradient-elementwise",
        FAMILY,
        ContiguousGradientElementwise,
        "refused",
        ("strides",),
        edit=turn_gradients(1),
        layouts=(PLAIN, DDP),  # under FSDP2 a rank asks its fragment, and one with a single row is contiguous
    ),
    Trap("variable-by-getenv", FAMILY, ByVariable, "equal", edit=set_variable),
    Trap("variable-elementwise", FAMILY, ByEntry, "equal", edit=set_variable),
)
