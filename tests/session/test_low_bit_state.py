"""State of classes that have few operators: taken over from plain steps, saved, refused by name where neither works.

Each case is shown for a class of our own and, where it is installed, for torchao's.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

import canzona_compile
from canzona_compile.errors import CanzonaError
from tests.harness.layouts import Case, full
from tests.harness.low_bit import LowBitMomentum
from tests.harness.marks import first
from tests.harness.optimizers import share_captures
from tests.harness.pairs import Pair, same_bits
from tests.harness.published import imported
from tests.harness.ranks import run

TORCHAO = "torchao.optim"
PACKAGES = ["tests.harness.low_bit", TORCHAO]


def make(package: str, params: list[Any], draws: bool = False) -> Optimizer:
    if package != TORCHAO:
        return LowBitMomentum(params, noise=draws)
    made: Optimizer = imported(TORCHAO).AdamW8bit(params, lr=0.01, bf16_stochastic_round=draws)
    return made


# -- taken over from plain steps ---------------------------------------------------------------------


def wrapped_late(package: str, layout: str, shape: tuple[int, int]) -> str:
    """Two plain steps, three wrapped ones; the error, or what differs from the plain optimizer on whole matrices."""
    pair = Pair(partial(make, package), (shape,) * 2, Case(layout, (2,)), compares_state=False)
    canzona_compile.unwrap(pair.wrapped)
    # torch's cache of compiled functions takes a step on quantized state for one on plain state of the same sizes.
    with torch._functorch.config.patch(enable_autograd_cache=False):
        try:
            pair.go(2)
            share_captures(canzona_compile.wrap(pair.wrapped))
            pair.go(3)
        except CanzonaError as error:
            return str(error)
    return str(pair.different())


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

    def begun() -> Pair:
        made = partial(make, package, draws=True)
        options: Any = {"dtype": torch.bfloat16, "captures_anew": True, "strategy": "owner", "one_per_matrix": made}
        return Pair(made, ((128, 64),) * 2, Case(layout, (2,)), **options)

    def train(pair: Pair, steps: range) -> None:
        for pair.number in steps:
            pair.feed()
            pair.wrapped.step()

    one, other = begun(), begun()
    train(one, range(3))
    assert {row.cell for row in canzona_compile.explain(one.wrapped).parameters} == {"own object"}
    state = copy.deepcopy(one.wrapped.state_dict())
    kept = [value for own in state["state"].values() for value in own.values() if isinstance(value, Tensor)]
    assert {type(value) for value in kept} == {Tensor}  # any checkpoint can hold them
    with torch.no_grad():
        for mine, yours in zip(other.laid.params, one.laid.params, strict=True):
            mine.copy_(yours)
    other.wrapped.load_state_dict(state)
    for pair in (one, other):
        train(pair, range(3, 5))
    pairs = enumerate(zip(one.laid.params, other.laid.params, strict=True))
    return [f"parameter {i}" for i, (mine, yours) in pairs if not same_bits(full(mine), full(yours))]


@pytest.mark.ranks
@pytest.mark.parametrize("package", first(PACKAGES))
def test_what_draws_is_saved(package: str) -> None:
    imported(package)
    assert run(2, saved_midway, package, "fsdp") == [[], []]
