"""Optimizers that call functions compiled by `torch.compile`: trials leave no trace in what those remember.

Compiled code is compiled anew when a size or a number differs from call to call, and then it rounds otherwise.
Inductor's does; here a backend stands in for it that adds a little more with every compile.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import Optimizer

import canzona_compile
from canzona_compile.capture.dynamo import as_written
from canzona_compile.capture.rehearsal import rehearse
from tests.harness.pairs import different, feed, parameters

STEPS = 3
SHAPES = ((24, 16),)  # other than those of miniatures
compiled: list[fx.GraphModule] = []
seen: list[Any] = []  # what compiled code was called with


def rounding_by_history(graph: fx.GraphModule, _examples: Any) -> Any:
    compiled.append(graph)
    number = len(compiled)

    def run(*args: Any) -> tuple[Any, ...]:
        seen.extend(args)
        return tuple(value + number * 1e-3 for value in graph(*args))

    return run


@torch.compile(backend=rounding_by_history)
def averaged(average: Tensor, grad: Tensor, beta: float, number: int = 1) -> Tensor:
    return (average * beta + grad * (1.0 - beta)) / (1.0 - beta**number)


class CompiledAverage(Optimizer):
    """A matrix optimizer whose average is compiled."""

    def __init__(self, params: Any, lr: float = 0.1, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["average"], state["number"] = torch.zeros_like(param), 0
                state["number"] += 1
                state["average"] = averaged(state["average"], param.grad, group["beta"], state["number"])
                param.add_(state["average"] / state["average"].norm(), alpha=-group["lr"])


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    compiled.clear()
    seen.clear()
    yield
    torch._dynamo.reset()


class BrokenAverage(CompiledAverage):
    """The same, called by something that Dynamo does not trace."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.add_(untraced(param.grad, group["beta"]), alpha=-group["lr"])


@torch.compiler.disable
def untraced(grad: Tensor, beta: float) -> Tensor:
    return averaged(grad @ grad.T @ grad, grad, beta)


def trained(optimizer: Any) -> Any:
    for step in range(STEPS):
        feed(optimizer, step)
        optimizer.step()
    return optimizer


def test_the_toy_shows_what_it_is_for() -> None:
    one = torch.ones(2)
    assert torch.equal(averaged(one, one, 0.5), averaged(one, one, 0.5))
    assert not torch.equal(averaged(one, one, 0.5), averaged(one, one, 0.25))


def test_a_rehearsal_compiles_nothing() -> None:
    rehearse(CompiledAverage(parameters()))
    assert not compiled


def test_bits_are_those_of_a_process_without_trials() -> None:
    plain = trained(CompiledAverage(parameters(SHAPES)))
    torch._dynamo.reset()
    compiled.clear()
    wrapped = trained(canzona_compile.wrap(CompiledAverage(parameters(SHAPES))))
    assert not different(plain, wrapped)
    assert wrapped.canzona.report().fallbacks  # its graph has other bits


def test_the_stance_that_users_chose_stays() -> None:
    one = torch.ones(2)
    with as_written():
        averaged(one, one, 0.5)
    assert not compiled
    averaged(one, one, 0.5)
    assert len(compiled) == 1


def test_compiled_functions_never_run_on_fake_tensors() -> None:
    """After a break Dynamo would call them; machine code then reads the memory that fake tensors do not have."""
    wrapped = trained(canzona_compile.wrap(BrokenAverage(parameters(SHAPES))))
    assert wrapped.canzona.report().fallbacks
    assert not any(isinstance(value, FakeTensor) for value in seen)
