"""Several logical matrices in one parameter: what cannot be, and who hears of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Muon

import canzona_compile
from canzona_compile import CanzonaError, Split
from tests.harness.layouts import Case, local
from tests.harness.mistakes import attempt, refused
from tests.harness.ranks import run
from tests.session.test_split import BLOCK, SHAPES, SPLITS, Both, Splits, alone

BAD: list[tuple[Callable[[], Any], str]] = [
    (lambda: Split({}), "there are no parts"),
    (lambda: Split({"q": 0}), "rows of q=0 is not a positive integer"),
    (lambda: Split({"q.k": 4}), "'q.k' cannot be the name of a part"),
    (lambda: Split({"q": 6, "k": 3}, interleaved=2), "interleaved=2 does not divide the 3 rows of 'k'"),
    (lambda: Split({"q": 6}, head=4), "head=4 does not divide the 6 rows of 'q'"),
    (lambda: Split({"q": 3}, order=[0, 1, 1]), "order= is not a permutation"),
    (lambda: Split({"q": 2}, order=[0, 1], interleaved=2), "or interleaved= is given as well"),
]


@pytest.mark.parametrize(("make", "says"), BAD, ids=[says for _, says in BAD])
def test_bad_splits(make: Callable[[], Any], says: str) -> None:
    with pytest.raises(CanzonaError, match=says):
        make()


@pytest.mark.parametrize(
    ("split", "says"),
    [
        (
            {"*.kqv": {"q": 32}},
            r"'\*.kqv' matches no parameter; the optimizer has attention.qkv, mlp.gate_up, mlp.down",
        ),
        ({"*.qkv": {"q": 32}, "attention*": {"q": 32}}, r"'\*.qkv' and 'attention\*' of split= both match"),
        (
            {"*.qkv": {"q": 16, "k": 8}},
            r"says q 16 \+ k 8 = 24 entries of dim 0, but the parameter has shape \[32, 16\]",
        ),
        ({"*.qkv": Split({"q": 16}, dim=2)}, "entries of dim 2"),
    ],
)
def test_bad_for_the_parameters(split: Splits, says: str) -> None:
    both = Both("muon", {}, None)
    both.options["split"] = split
    both.wrapped = both.wrap_one("muon")
    with refused(says, unchanged=both.laid.params):
        both.go(1)


def test_a_model_without_the_parameter() -> None:
    with pytest.raises(CanzonaError, match=r"parameter 0 of group 0, of shape \[4, 4\], is not in the model"):
        canzona_compile.wrap(Muon([nn.Parameter(torch.ones(4, 4))]), model=nn.Linear(2, 2))


def test_a_step_that_is_refused_leaves_what_users_wrote_meanwhile() -> None:
    """Pieces that are copies are written back after a step has read the parameter, and not before."""
    fused, other = (nn.Parameter(torch.randn(8, 4)) for _ in range(2))
    split = {"fused": Split({"q": 4, "k": 4}, interleaved=2)}
    optimizer = canzona_compile.wrap(Muon([("fused", fused), ("other", other)]), split=split)
    for _ in range(2):
        fused.grad, other.grad = torch.ones(8, 4), torch.ones(8, 4)
        optimizer.step()
    with torch.no_grad():
        fused.mul_(2)
    optimizer.state[other]["momentum_buffer"] = torch.zeros(8, 4)
    with refused("tensors in its state were replaced", unchanged=[fused]):
        optimizer.step()


def scattered() -> str:
    both = Both("muon", SPLITS["any order"], Case("fsdp", (2,)))
    return attempt(lambda: both.go(1)).said


def test_an_order_that_crosses_ranks_is_refused_on_all_of_them() -> None:
    for said in run(2, scattered):
        assert "that are not consecutive" in said
        assert "attention.qkv" in said
        assert "choose order= so that rows stay on their rank" in said


def bad_gradient(what: str) -> str:
    """A gradient that is bad on rank 1 only; what the other rank hears of it."""
    both = Both("muon", BLOCK, Case("fsdp", (2,)), strategy="owner")
    both.go(1)
    for i, param in enumerate(both.laid.params):
        param.grad = both.laid.like_param(torch.ones(SHAPES[i]), i)
    if torch.distributed.get_rank() == 1:
        qkv = both.laid.params[0]
        qkv.grad = None
        qkv.grad_dtype = torch.bfloat16 if what == "dtype" else None
        qkv.grad = None if what == "none" else both.laid.like_param(torch.ones(SHAPES[0]).bfloat16(), 0)
    with refused(unchanged=map(local, both.laid.params)) as error:
        both.wrapped.step()
    return str(error.value)


@pytest.mark.parametrize(("what", "says"), [("none", "no gradient for attention.qkv[q]"), ("dtype", "torch.bfloat16")])
def test_a_bad_gradient_on_one_rank_is_an_error_on_all(what: str, says: str) -> None:
    for said in run(2, bad_gradient, what, fresh=True, after=alone("muon", BLOCK)):
        assert says in said
        assert "attention.qkv" in said
