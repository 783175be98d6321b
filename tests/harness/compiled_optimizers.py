"""Optimizers whose steps call functions that `torch.compile` made, as those of published ones do.

The backend stands in for Inductor: what it compiles gives other bits than the code as written, so that a graph of that
code's operators would show.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.optim import Optimizer

from tests.harness.toy_optimizers import PerParameter, State, cube
from tests.harness.traps.grammar import toy

SHIFT = 2.0**-10


def shifted(graph: fx.GraphModule, _examples: Any) -> Any:
    """A backend that adds a little to all results."""

    def run(*args: Any) -> tuple[Any, ...]:
        return tuple(value + SHIFT if isinstance(value, Tensor) else value for value in graph(*args))

    return run


@torch.compile(backend=shifted)
@torch.no_grad()
def adam(
    grad: Tensor,
    mean: Tensor,
    square: Tensor,
    *,
    betas: tuple[float, float],
    eps: float,
    step: int,
    nesterov: bool = False,
    name: str | None = None,
) -> Tensor:
    """Writes two tensors in place, and reads an integer that changes on every step."""
    assert isinstance(step, int), name
    mean.lerp_(grad, 1 - betas[0])
    square.lerp_(grad.square(), 1 - betas[1])
    ahead = mean.lerp(grad, betas[0]) if nesterov else mean
    return ahead / (1 - betas[0] ** step) / ((square / (1 - betas[1] ** step)).sqrt() + eps)


@torch.compile(backend=shifted)
def decomposed(weight: Tensor, grad: Tensor, norms: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Gives several tensors, of several shapes."""
    unit = weight / norms
    along = (grad * unit).sum(dim=1, keepdim=True)
    return unit, {"along": along, "across": norms * (grad - unit * along)}


def doubled(value: Tensor) -> Tensor:
    return value * 2


@torch.compile(backend=shifted)
def inverse(matrix: Tensor) -> Tensor:
    """A product, in the precision that the step has set."""
    return matrix @ matrix.T / matrix.norm()


@torch.compile(backend=shifted)
def clipped(value: Tensor, most: float) -> None:
    """Does nothing if there is no bound."""
    if most:
        value.clamp_(-most, most)


twice = torch.compile(doubled, backend=shifted)  # under another name than that of what it compiles


@torch.compile(backend=shifted)
def pulled(value: Tensor, param: Tensor) -> Tensor:
    """Reads a tensor that it is not given."""
    assert param.grad is not None
    return value * param.grad


@torch.compile(backend=shifted)
def turned(value: Tensor) -> Tensor:
    """Gives a view."""
    value.mul_(2)
    return value.T


@torch.compile(backend=shifted)
def scaled_for(optimizer: Optimizer, value: Tensor) -> Tensor:
    return value * len(optimizer.param_groups)


def nested() -> Any:
    @torch.compile(backend=shifted)
    def hidden(value: Tensor) -> Tensor:
        return value * 2

    return hidden


HIDDEN = {"function": nested()}


@torch.compile(backend=shifted)
def noisy(value: Tensor) -> Tensor:
    return value + torch.randn_like(value)


@torch.compile(backend=shifted)
def factored(value: Tensor) -> Tensor:
    return torch.linalg.cholesky(value)


@torch.compile(backend=shifted)
def refusing(value: Tensor, step: int) -> Tensor:
    if step % 2:
        raise ValueError("odd")
    return value * 2


def calling(*functions: str) -> dict[str, str]:
    """The pieces of a toy that calls functions of this module."""
    return {"outside": f"from {__name__} import {', '.join(functions)}"}


# Adam on what a product of matrices gave, as SOAP has it.
CompiledAdam = toy("compiled-adam", hypers="betas=(0.9, 0.95)", **calling("adam", "clipped"))("""
    if not state:
        state.update(step=0, mean=torch.zeros_like(param), square=torch.zeros_like(param))
    projected = cube(grad)
    clipped(projected, 0.0)
    update = adam(
        projected, state["mean"], state["square"], betas=group["betas"], eps=1e-8, step=state["step"] + 1, name="x"
    )
    param.add_(update @ update.T @ update, alpha=-group["lr"])
    state["step"] += 1
""")
# Several calls on each step, of the parameter itself, on every third step one more; results become state.
CompiledParts = toy("compiled-parts", **calling("adam", "decomposed", "twice"))("""
    if not state:
        state.update(step=0, norms=param.norm(dim=1, keepdim=True) + 1)
        state.update(mean=torch.zeros_like(state["norms"]), square=torch.zeros_like(state["norms"]))
    state["step"] += 1
    unit, parts = decomposed(param, grad, state["norms"])
    lengths = adam(parts["along"], state["mean"], state["square"], betas=(0.9, 0.99), eps=1e-6, step=state["step"])
    state["norms"].add_(lengths, alpha=-group["lr"])
    across = cube(parts["across"])
    if state["step"] % 3 == 0:
        across = twice(across)
    turned = unit.add(across / (across.norm() + 1e-6), alpha=-group["lr"])
    param.copy_(turned * state["norms"])
    state["norms"] = turned.norm(dim=1, keepdim=True) + 1
""")
# Products in two precisions, one of them in compiled code.
CompiledProducts = toy("compiled-products", **calling("inverse"))("""
    gram = grad @ grad.T
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    factor = inverse(gram)
    torch.set_float32_matmul_precision(before)
    param.add_(factor @ grad, alpha=-group["lr"])
""")
# It calls a compiled function from its fourth step on.
CallingLate = toy("calling-late", **calling("twice"))("""
    print(end="")
    state["step"] = state.get("step", 0) + 1
    update = cube(grad)
    param.add_(update if state["step"] < 4 else twice(update), alpha=-group["lr"])
""")
# Its compiled function gets the gradient by itself.
Pulling = toy("pulling", **calling("pulled"), update="pulled(cube(grad), param)")()
# Its compiled function returns a view of what it writes.
ReturningAView = toy("returning-a-view", **calling("turned"), update="turned(cube(grad).clone()).T")()
# It gives itself to a compiled function.
Given = toy("given", **calling("scaled_for"))('param.add_(scaled_for(self, cube(grad)), alpha=-group["lr"])')
# Nothing names its compiled function.
Hidden = toy("hidden", **calling("HIDDEN"), update='HIDDEN["function"](cube(grad))')()
# Its compiled function draws random numbers.
DrawingInside = toy("drawing-inside", **calling("noisy"), update="noisy(cube(grad))")()
# It goes on where its compiled function fails.
Catching = toy("catching", **calling("factored"))("""
    gram = grad @ grad.T + torch.eye(len(grad))
    try:
        factor = factored(gram)
    except torch.linalg.LinAlgError:
        factor = torch.eye(len(grad))
    param.add_(factor @ grad, alpha=-group["lr"])
""")
# Its compiled function raises on every other step, by itself and no operator in it.
Avoiding = toy("avoiding", **calling("refusing"))("""
    state["step"] = state.get("step", 0) + 1
    update = cube(grad)
    with contextlib.suppress(ValueError):
        update = refusing(update, state["step"])
    param.add_(update, alpha=-group["lr"])
""")


class Method(PerParameter):
    """Its compiled function is a method, and takes the optimizer."""

    @torch.compile(backend=shifted)
    def scaled(self, value: Tensor) -> Tensor:
        return value * len(self.param_groups)

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        param.add_(self.scaled(cube(grad)), alpha=-group["lr"])


class EagerMethod(Method):
    """Nor can the rest of its step be captured."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        param.add_(torch.from_numpy(self.scaled(cube(grad)).numpy()), alpha=-group["lr"])


class CompiledStep(Optimizer):
    """Its whole step is compiled."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    @torch.compile(backend=shifted)
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.add_(cube(param.grad), alpha=-group["lr"])
