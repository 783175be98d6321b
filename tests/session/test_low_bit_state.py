"""State of classes that have few operators: taken over from plain steps, or refused by name.

Each case is shown for a class of our own and, where it is installed, for torchao's.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

import canzona_compile
from canzona_compile.errors import CanzonaError
from tests.harness.layouts import Case
from tests.harness.low_bit import LowBitMomentum
from tests.harness.marks import first
from tests.harness.optimizers import share_captures
from tests.harness.pairs import Pair
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


@pytest.mark.parametrize("package", first(PACKAGES))
def test_fragments_of_plain_steps_are_put_together(package: str) -> None:
    imported(package)
    assert run(2, wrapped_late, package, "fsdp", (128, 64)) == ["[]", "[]"]


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


# -- one object per matrix ---------------------------------------------------------------------------


@pytest.mark.parametrize("package", first(PACKAGES))
def test_what_only_its_class_can_save_is_refused_with_its_name(package: str) -> None:
    """A checkpoint holds plain tensors, and a state dict with others can only be loaded as the class likes."""
    imported(package)
    made = partial(make, package, draws=True)
    pair = Pair(made, ((128, 64),) * 2, dtype=torch.bfloat16, captures_anew=True, one_per_matrix=made)
    pair.feed()
    pair.wrapped.step()
    assert {row.cell for row in canzona_compile.explain(pair.wrapped).parameters} == {"own object"}
    kind = "OptimState8bit" if package == TORCHAO else "LowBit"
    with pytest.raises(CanzonaError, match=f"has a {kind} at state/0/") as caught:
        pair.wrapped.state_dict()
    assert caught.value.at == "group0.param0"
