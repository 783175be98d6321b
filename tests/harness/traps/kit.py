"""What the source of traps may name: packages, tensor functions, base classes, and objects that hold something."""
# ruff: noqa: F401

from __future__ import annotations

import contextlib
import contextvars
import copy
import enum
import functools
import itertools
import logging
import math
import os
import random
import time
import types
import warnings
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.weak import WeakTensorKeyDictionary

import tests.harness
from tests.harness.toy_optimizers import PerParameter, State, cube
from tests.harness.traps.trap import Params

# -- parameters and gradients ----------------------------------------------------------------------


def halves(params: Params, *first: dict[str, Any]) -> list[dict[str, Any]]:
    """Two groups of equally many parameters, with hyperparameters for each."""
    middle = len(params) // 2
    groups = [{"params": params[:middle]}, {"params": params[middle:]}]
    return [{**group, **hypers} for group, hypers in zip(groups, first or ({}, {}), strict=True)]


def with_nan(grad: Tensor) -> Tensor:
    """The same gradient with one element that is no number."""
    grad = grad.clone()
    grad[0, 0] = math.nan
    return grad


def turn(grad: Tensor) -> Tensor:
    """The same gradient, or its fragment, in columns."""
    if not isinstance(grad, DTensor):
        return grad.t().contiguous().t()
    turned = grad.to_local().t().contiguous().t()
    mesh, placements = grad.device_mesh, grad.placements
    return DTensor.from_local(turned, mesh, placements, run_check=False, shape=grad.shape, stride=grad.stride())


def norm_of(params: Params) -> float:
    """The norm of all gradients, on the host."""
    return math.sqrt(sum(float(p.grad.square().sum()) for p in params))


@functools.lru_cache
def identity(size: int) -> Tensor:
    """A cached tensor that is found through modules."""
    return torch.eye(size)


class WrittenInPlace:
    """Moves gradients into the memory of those of a step, before each step after it, as a backward pass may do.

    Args:
        since: the step.
    """

    def __init__(self, since: int = 0) -> None:
        self.since, self.homes = since, list[Any]()

    def __call__(self, params: Params, step: int) -> None:
        """Do it."""
        if step == self.since:
            self.homes = [param.grad for param in params]
        if step <= self.since:
            return
        for param, home in zip(params, self.homes, strict=True):
            home.copy_(param.grad)
            param.grad = home


# -- what holds something --------------------------------------------------------------------------


@dataclass
class Clock:
    """Counts."""

    ticks: int = 0


class ClockModule(nn.Module):
    """Counts in a buffer."""

    ticks: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ticks", torch.zeros(()))


@dataclass
class Settings:
    """A config object of a module, as training scripts have."""

    factor: float = 1.0


def linear(first: float = 0.0) -> nn.Linear:
    """A module whose weights are the same in every run."""
    module = nn.Linear(3, 3, bias=False)
    with torch.no_grad():
        module.weight.copy_(torch.arange(9.0).view(3, 3) / 10 + first)
    return module


class Factor:
    """A preconditioner."""

    def __init__(self, rows: int) -> None:
        self.matrix = torch.eye(rows)
        self.updates = 0

    def apply(self, grad: Tensor) -> Tensor:
        """Update it by a gradient, and precondition that."""
        self.updates += 1
        self.matrix.lerp_(grad @ grad.T, 0.1 / self.updates)
        return self.matrix @ grad


class Calling(Optimizer):
    """Base of optimizers with a call of their own."""

    def __init__(self, params: Params) -> None:
        super().__init__(params, {"lr": 0.1})

    def take(self, scale: Any = 1.0) -> None:
        """Step all parameters."""
        with torch.no_grad():
            for group in self.param_groups:
                for param in group["params"]:
                    if param.grad is not None:
                        param.sub_(cube(param.grad) * (group["lr"] * scale))


# -- for steps that swallow errors ------------------------------------------------------------------


def gram(grad: Tensor) -> Tensor:
    """A positive definite matrix of a gradient."""
    return grad @ grad.T + 0.1 * torch.eye(len(grad))


def mixed(grad: Tensor) -> Tensor:
    """A symmetric matrix that is positive definite for next to no random gradient, and is for large ones."""
    return grad @ grad.T - 2.0 * torch.eye(len(grad))


def large(value: float) -> float:
    """A number of a large gradient. Random ones have none, so that a comparison on these shows nothing."""
    if value < 30.0:
        raise ValueError("too small")
    return value


class Quiet:
    """A context manager that swallows errors and counts them."""

    def __init__(self) -> None:
        self.failed = False

    def __enter__(self) -> Quiet:
        self.failed = False
        return self

    def __exit__(self, *error: Any) -> bool:
        self.failed = error[0] is not None
        return True


class Helper:
    """An object that computes factors, and falls back."""

    def __init__(self, attempt: Callable[[Tensor], Tensor]) -> None:
        self.attempt = attempt

    def __call__(self, grad: Tensor) -> Tensor:
        try:
            return self.attempt(grad)
        except Exception:
            return gram(grad)


class Tries(PerParameter):
    """Base of optimizers that try one factor, and have another one where that fails."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        param.sub_(self.factor(grad, state) @ grad * group["lr"])

    def factor(self, grad: Tensor, state: State) -> Tensor:
        raise NotImplementedError


# -- for state that is made up ---------------------------------------------------------------------


def are_alike(one: Any, other: Any) -> bool:
    """Whether two entries are tensors of one shape and dtype."""
    tensors = isinstance(one, Tensor) and isinstance(other, Tensor)
    return tensors and (one.shape, one.dtype) == (other.shape, other.dtype)


def as_gradient(entry: Any, grad: Tensor) -> Any:
    """Bring an entry into a form that can be added to a gradient."""
    if not isinstance(entry, Tensor):
        return entry
    if entry.ndim == 2 and entry.shape != grad.shape:
        return entry.T.to(grad.dtype)
    if entry.ndim == 1:
        return (entry[:, None] if len(entry) == grad.shape[0] else entry[None, :]).to(grad.dtype)
    return entry.to(grad.dtype)


def as_entry(grad: Tensor, entry: Any) -> Any:
    """Bring a gradient into the form of an entry."""
    if not isinstance(entry, Tensor):
        return float(entry) + 1.0
    if entry.ndim == 0:
        return grad.norm().to(entry.dtype)
    if entry.ndim == 1:
        return (grad.sum(1) if len(entry) == grad.shape[0] else grad.sum(0)).to(entry.dtype)
    return (grad if entry.shape == grad.shape else grad.T).to(entry.dtype)


# -- for steps that are written for people ---------------------------------------------------------


@contextlib.contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """Products inside are computed in this precision."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def traced_by_nobody(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A decorator whose wrapper Dynamo refuses, as its `print` does."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Tensor:
        print(end="")
        return function(*args, **kwargs)

    return wrapper


@traced_by_nobody
def orthogonal(matrix: Tensor, steps: int, eps: float) -> Tensor:
    """Newton-Schulz."""
    matrix = matrix / (matrix.norm() + eps)
    for _ in range(steps):
        matrix = 1.5 * matrix - 0.5 * matrix @ matrix.T @ matrix
    return matrix
