"""State of classes that have few operators: taken over from plain steps, saved, refused by name where neither works.

Each case is shown for a class of our own and, where it is installed, for torchao's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import canzona_compile
from canzona_compile.errors import CanzonaError
from tests.harness.layouts import Case, Laid, full
from tests.harness.low_bit import LowBitMomentum
from tests.harness.marks import first
from tests.harness.optimizers import share_captures
from tests.harness.pairs import params_of, same_bits
from tests.harness.published import imported
from tests.harness.ranks import run

TORCHAO = "torchao.optim"
PACKAGES = ["tests.harness.low_bit", TORCHAO]


def make(package: str, params: list[Any], draws: bool = False) -> Optimizer:
    if package != TORCHAO:
        return LowBitMomentum(params, noise=draws)
    made: Optimizer = imported(TORCHAO).AdamW8bit(params, lr=0.01, bf16_stochastic_round=draws)
    return made


def values_of(shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], Callable[[], Tensor]]:
    """First values of two parameters, and what draws a gradient."""
    random = torch.Generator().manual_seed(0)

    def drawn() -> Tensor:
        return torch.randn(shape, generator=random).to(dtype)

    return [drawn(), drawn()], drawn


# -- taken over from plain steps ---------------------------------------------------------------------


def wrapped_late(package: str, layout: str, shape: tuple[int, int]) -> str:
    """Two plain steps, three wrapped ones; the error, or what differs from the plain optimizer on whole matrices."""
    first, drawn = values_of(shape)
    laid = Laid(first, Case(layout, (2,)))
    optimizer = make(package, laid.params)
    plain = make(package, [nn.Parameter(value.clone()) for value in first])
    # torch's cache of compiled functions takes a step on quantized state for one on plain state of the same sizes.
    with torch._functorch.config.patch(enable_autograd_cache=False):
        for step in range(5):
            if step == 2:
                optimizer = canzona_compile.wrap(optimizer)
                share_captures(optimizer)
            for i, param in enumerate(params_of(plain)):
                param.grad = drawn()
                laid.params[i].grad = laid.like_param(param.grad, i)
            try:
                optimizer.step()
            except CanzonaError as error:
                return str(error)
            plain.step()
    pairs = enumerate(zip(laid.params, params_of(plain), strict=True))
    return str([i for i, (mine, whole) in pairs if not same_bits(full(mine), whole.detach())])


@pytest.mark.ranks
@pytest.mark.parametrize("package", first(PACKAGES))
def test_fragments_of_plain_steps_are_put_together(package: str) -> None:
    imported(package)
    assert run(2, wrapped_late, package, "fsdp", (128, 64)) == ["[]", "[]"]


@pytest.mark.ranks
@pytest.mark.parametrize("package", first(PACKAGES))
@pytest.mark.parametrize(
    ("layout", "shape", "why"),
    [("fsdp", (129, 64), "their shapes differ: [65, 64], [64, 64]"), ("tp_columns", (128, 64), "NotImplementedError")],
    ids=["unequal", "columns"],
)
def test_fragments_that_stay_apart_are_refused_on_all_ranks(
    package: str, layout: str, shape: tuple[int, int], why: str
) -> None:
    """Some of torchao's unequal ones are of whole blocks and some are not, so that ranks hold state of different
    classes. Gathered columns have to be split, for which neither class has an operator."""
    imported(package)
    for said in run(2, wrapped_late, package, layout, shape):
        assert "the fragments of state" in said
        assert why in said
        assert "at:   group0.param0" in said
        assert "hint: call wrap before the first step" in said


# -- saved -------------------------------------------------------------------------------------------


def saved_midway(package: str, layout: str) -> list[str]:
    """Three steps, two more, and the same two by a new optimizer that loads what was saved; what differs."""
    first, drawn = values_of((128, 64), torch.bfloat16)
    grads = [[drawn() for _ in first] for _ in range(5)]

    def train(optimizer: Any, laid: Laid, steps: range) -> None:
        for step in steps:
            for i, param in enumerate(laid.params):
                param.grad = laid.like_param(grads[step][i], i)
            optimizer.step()

    def begun(values: list[Tensor]) -> tuple[Any, Laid]:
        laid = Laid(values, Case(layout, (2,)))
        optimizer = canzona_compile.wrap(
            make(package, laid.params, draws=True),
            strategy="owner",
            one_per_matrix=partial(make, package, draws=True),
        )
        return optimizer, laid

    one, laid = begun(first)
    train(one, laid, range(3))
    assert {row.cell for row in canzona_compile.explain(one).parameters} == {"own object"}
    state, values = copy.deepcopy(one.state_dict()), [full(param).detach().clone() for param in laid.params]
    kept = [value for own in state["state"].values() for value in own.values() if isinstance(value, Tensor)]
    assert {type(value) for value in kept} == {Tensor}  # any checkpoint can hold them
    train(one, laid, range(3, 5))
    other, again = begun(values)
    other.load_state_dict(state)
    train(other, again, range(3, 5))
    pairs = enumerate(zip(laid.params, again.params, strict=True))
    return [f"parameter {i}" for i, (mine, yours) in pairs if not same_bits(full(mine), full(yours))]


@pytest.mark.ranks
@pytest.mark.parametrize("package", first(PACKAGES))
def test_what_draws_is_saved(package: str) -> None:
    imported(package)
    assert run(2, saved_midway, package, "fsdp") == [[], []]
