"""Optimizers written as people write them for people, which Dynamo cannot trace but dispatch can capture."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from tests.harness.toy_optimizers import PerParameter, State


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


class DecoratedMuon(PerParameter):
    """Nested functions, a partial, a number made a tensor, a float counter."""

    def __init__(self, params: Any, lr: float = 0.1, beta: float = 0.9, decay: float = 0.01) -> None:
        super().__init__(params, lr=lr, beta=beta, decay=decay)

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        if not state:
            state.update(step=0, momentum=torch.zeros_like(param))
        state["step"] += 1
        state["momentum"].lerp_(grad, 1 - group["beta"])
        update = functools.partial(orthogonal, steps=3)(state["momentum"], eps=1e-7)
        update = update / torch.tensor(1 - group["beta"] ** state["step"])
        param.mul_(1 - group["lr"] * group["decay"]).add_(update, alpha=-group["lr"])


class OnePrecision(PerParameter):
    """All of its products are in one precision, which is not that of the user."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        with matmul_precision("medium"):
            update = orthogonal(grad, 2, 1e-7)
        param.add_(update, alpha=-group["lr"])


class TwoPrecisions(PerParameter):
    """One product in the user's precision, another one in its own."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        gram = grad @ grad.T
        with matmul_precision("high"):
            update = gram @ grad
        param.add_(update, alpha=-group["lr"])


class PlainPrecision(PerParameter):
    """Sets the precision itself, in what Dynamo can trace."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        torch.set_float32_matmul_precision("high")
        update = grad @ grad.T @ grad
        torch.set_float32_matmul_precision("highest")
        param.add_(update, alpha=-group["lr"])


class Subtracting(PerParameter):
    """A counter that becomes an input only when it has changed, and a factor that stays a constant of graphs."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        state["step"] = state.get("step", 0) + 1
        print(end="")
        moved = param.sub(grad @ grad.T @ grad, alpha=group["lr"])
        param.copy_(moved * (1 - 0.1 / state["step"]))


class TurningBasis(PerParameter):
    """A basis that is laid out by rows at first, and by columns from its first refresh on."""

    def __init__(self, params: Any, lr: float = 0.1, every: int = 3) -> None:
        super().__init__(params, lr=lr, every=every)

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        if not state:
            state.update(step=0, basis=torch.eye(len(param)))
        state["step"] += 1
        if state["step"] % group["every"] == 0:
            state["basis"] = torch.linalg.qr(grad @ grad.T + state["basis"])[0]
        param.add_(state["basis"] @ grad, alpha=-group["lr"])


class DecoratedBasis(TurningBasis):
    """The same, such that Dynamo cannot trace it."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        print(end="")
        super().update(param, grad, group, state)
        print(end="")


class FloppingBasis(PerParameter):
    """A basis whose layout changes on every step."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        if not state:
            state.update(step=0, basis=torch.ones(len(param), len(param)))
        state["step"] += 1
        new = torch.linalg.qr(grad @ grad.T + state["basis"])[0]
        state["basis"] = new if state["step"] % 2 else new.contiguous()
        param.add_(state["basis"] @ grad, alpha=-group["lr"])


class Retrying(PerParameter):
    """Catches that a matrix has no Cholesky factor, and takes another way then."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        print(end="")
        gram = grad @ grad.T - 4 * torch.eye(len(grad))
        try:
            factor = torch.linalg.cholesky(gram)
        except torch.linalg.LinAlgError:
            factor = torch.eye(len(grad))
        param.add_(factor @ grad, alpha=-group["lr"])


class Differentiating(PerParameter):
    """Finds its update with autograd."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        print(end="")
        with torch.enable_grad():
            x = grad.clone().requires_grad_()
            (slope,) = torch.autograd.grad((x @ x.T @ x).square().sum(), x)
        param.add_(slope / (1 + slope.norm()), alpha=-group["lr"])


class MemorySwapping(PerParameter):
    """Gives the parameter other memory in place of writing to it."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        gram = grad @ grad.T
        print(end="")
        param.data = param - group["lr"] * gram @ grad


SCALE = {"of": 1.0}


class Looking(PerParameter):
    """Looks at a global number on every step, with `globals()`, so that nothing can follow its code there."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        update = grad @ grad.T
        print(end="")
        update, scale = update @ grad, globals()["SCA" + "LE"]["of"]
        param.add_(update if scale < 3 else update.sign(), alpha=-group["lr"] * scale)
