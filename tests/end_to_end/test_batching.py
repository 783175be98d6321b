"""Optimizers that batch matrices: results have the bits of the plain optimizer that steps each matrix alone."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import canzona_compile
from canzona_compile.errors import RoundsOtherwise, UnsupportedOptimizer
from canzona_compile.tools.verification.check import verify
from tests.harness.layouts import Case
from tests.harness.marks import first
from tests.harness.optimizers import BatchedMuon
from tests.harness.pairs import Pair, Shape, feed, parameters, params_of
from tests.harness.ranks import run

SHAPES: tuple[Shape, ...] = ((9, 5), (10, 6), (9, 5), (10, 6))
LARGE: tuple[Shape, ...] = ((24, 16), (31, 17), (24, 16), (31, 17))


class EachAlone(Optimizer):
    """An optimizer object for each matrix."""

    def __init__(self, params: Any, make: Callable[[Any], Optimizer]) -> None:
        super().__init__(params, {"lr": 0.1})
        self.each = [(param, make([param])) for param in params_of(self)]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param, own in self.each:
            if param.grad is not None:
                own.step()
                self.state[param] = own.state[param]


def pair(make: Callable[[Any], Optimizer], case: Case | None = None, **options: Any) -> Pair:
    """A wrapped optimizer beside one object for each matrix."""
    made = Pair(make, SHAPES, case, **options)
    made.plain = EachAlone(params_of(made.plain), make)
    return made


def trained(case: Case | None, dtype: torch.dtype, **options: Any) -> list[str]:
    """What `RoundsOtherwise` says while a pair trains, explains and reports, and is loaded and trains on."""

    def make(params: Any) -> Optimizer:
        return BatchedMuon(params, dtype=dtype)

    both = pair(make, case, captures_anew=True, **options)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for step in range(5):
            both.step(*([1] if step == 2 else []))
        said = [*canzona_compile.explain(both.wrapped).bits, *both.report.bits]
        both.wrapped.load_state_dict(both.wrapped.state_dict())
        both.step()
    assert {row.how for row in canzona_compile.explain(both.wrapped).parameters} <= {"compiled", "local"}
    return [*said, *(str(one.message).partition("\n")[0] for one in heard if one.category is RoundsOtherwise)]


@pytest.mark.parametrize("dtype", first([torch.float32, torch.bfloat16]))
def test_each_matrix_has_the_bits_that_it_has_alone(dtype: torch.dtype) -> None:
    explained, reported, *warned = trained(None, dtype, audit=2)
    assert [f"{explained}."] == [f"{reported}."] == warned
    assert "BatchedMuon batches matrices" in explained
    small = ("the largest relative difference is", "there is no difference")[dtype == torch.bfloat16]
    assert small in explained  # of small matrices with even dims, in bfloat16 products of stacks round as others do


def test_each_matrix_has_the_bits_that_it_has_alone_on_ranks() -> None:
    for explained, reported, *warned in run(2, trained, Case("fsdp", (2,)), torch.float32):
        assert [f"{explained}."] == [f"{reported}."] == warned


def test_plain_steps_of_a_batch_round_otherwise() -> None:
    """So that the tests before this one compare something. Which shapes do depends on the processor."""
    shapes = (*SHAPES, (7, 5), (7, 5))
    plain, alone = BatchedMuon(parameters(shapes)), EachAlone(parameters(shapes), BatchedMuon)
    for optimizer in (plain, alone):
        feed(optimizer, 0)
        optimizer.step()
    assert any(not torch.equal(a, b) for a, b in zip(params_of(plain), params_of(alone), strict=True))


@pytest.mark.parametrize(
    ("hypers", "why"),
    [
        ({"clip": 1.0}, "the update of one depends on the values of others"),
        ({"average": True}, "the update of one depends on which others there are"),
        ({"largest": 500}, "the update of one depends on others"),  # only labels see it: small matrices keep apart
    ],
)
def test_who_batches_and_couples_is_refused(hypers: dict[str, Any], why: str) -> None:
    wrapped = canzona_compile.wrap(BatchedMuon(parameters(LARGE), **hypers))
    feed(wrapped, 0)
    warnings.simplefilter("ignore", RoundsOtherwise)
    with pytest.raises(UnsupportedOptimizer, match=why) as caught:
        wrapped.step()
    assert "this breaks line 2" in str(caught.value)


def build() -> tuple[nn.Module, Optimizer]:
    model = nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 6), nn.Linear(6, 10))
    return model, BatchedMuon(model.parameters())


@pytest.mark.full
def test_verify_compares_with_each_matrix_alone() -> None:
    found = verify(build, steps=3)
    assert found.ok, found
    assert "BatchedMuon batches matrices" in found.bits[0]
    assert found.bits[0][:30] in str(found)
