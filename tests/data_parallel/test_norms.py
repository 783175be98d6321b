"""Clipping by norms of any order, beside torch's own."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon

from tests.harness.model_pairs import ModelPair, under_zero1
from tests.harness.ranks import run

ORDERS = (0.0, 1.0, 2.0, 3.0, math.inf)


def norms(model: nn.Module, make: Any, order: float) -> tuple[ModelPair, Tensor, Tensor]:
    """A model under zero1 beside a plain one, and the norms by which both have clipped gradients of one batch."""
    inputs = torch.randn(5, model[0].in_features, generator=torch.Generator().manual_seed(1))  # type: ignore[index]
    pair = under_zero1(model, lambda m: [make(m.parameters())], lambda m, *_: m(inputs).square().mean())
    pair.both_backward(0)
    theirs = nn.utils.clip_grad_norm_(pair.plain.parameters(), 1.0, norm_type=order)
    return pair, pair.handle.clip_grad_norm_(1.0, norm_type=order), theirs


def found() -> list[bool]:
    """For each order, whether all gradients have the norm that torch finds on one device, and train as there."""
    same = []
    for order in ORDERS:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Linear(8, 4, bias=False))
        pair, ours, theirs = norms(model, Muon, order)
        for one in (pair.model, pair.plain):
            torch._foreach_mul_([param.grad for param in one.parameters()], 0.75)
        pair.update()
        same.append(torch.equal(ours, theirs) and not pair.different())
    return same


def test_norms_of_any_order() -> None:
    """Muon's matrices have one owner each, so that the bits are torch's."""
    assert run(2, found) == [[True] * len(ORDERS)] * 2


def cut_ones() -> list[str]:
    """The orders in which the norm of a table that is cut is not torch's, up to the order of a sum."""
    wrong = []
    for order in ORDERS:
        torch.manual_seed(0)
        pair, ours, theirs = norms(nn.Sequential(nn.Linear(32, 1100)), AdamW, order)
        assert any(fragment.cut for fragment in pair.handle.zero1.fragments.values())
        if not torch.allclose(ours, theirs, rtol=1e-5, atol=0.0):
            wrong.append(f"order {order}: {ours} for {theirs}")
    return wrong


def test_norms_of_any_order_of_what_is_cut() -> None:
    assert run(2, cut_ones) == [[]] * 2
