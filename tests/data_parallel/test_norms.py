"""Clipping by norms of any order, beside torch's own."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import AdamW, Muon

import canzona_compile
from tests.harness.layouts import mesh_of
from tests.harness.optimizers import shared_captures
from tests.harness.ranks import run

ORDERS = (0.0, 1.0, 2.0, 3.0, math.inf)


def made() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8, bias=False), nn.Linear(8, 4, bias=False))


def found() -> list[bool]:
    """For each order, whether all gradients have the norm that torch finds on one device, and train as there."""
    mesh, same = mesh_of((dist.get_world_size(),), ("dp",)), []
    batch = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
    for order in ORDERS:
        model, plain = made(), made()
        with shared_captures():
            optimizer: Any = canzona_compile.zero1(model, Muon(model.parameters()), mesh=mesh)
        for one in (model, plain):
            one(batch).square().mean().backward()
        ours = optimizer.canzona.clip_grad_norm_(1.0, norm_type=order)
        theirs = nn.utils.clip_grad_norm_(plain.parameters(), 1.0, norm_type=order)
        for one in (model, plain):
            torch._foreach_mul_([param.grad for param in one.parameters()], 0.75)
        optimizer.step()
        Muon(plain.parameters()).step()
        same.append(torch.equal(ours, theirs) and all(map(torch.equal, model.parameters(), plain.parameters())))
    return same


@pytest.mark.ranks
def test_norms_of_any_order() -> None:
    """Muon's matrices have one owner each, so that the bits are torch's."""
    assert run(2, found) == [[True] * len(ORDERS)] * 2


def cut_ones() -> list[str]:
    """The orders in which the norm of a table that is cut is not torch's, up to the order of a sum."""
    mesh, wrong = mesh_of((dist.get_world_size(),), ("dp",)), []
    batch = torch.randn(5, 32, generator=torch.Generator().manual_seed(1))
    for order in ORDERS:
        torch.manual_seed(0)
        model = nn.Linear(32, 1100)
        plain = copy.deepcopy(model)
        with shared_captures():
            optimizer: Any = canzona_compile.zero1(model, AdamW(model.parameters()), mesh=mesh)
        assert any(fragment.cut for fragment in optimizer.canzona.zero1.fragments.values())
        for one in (model, plain):
            one(batch).square().mean().backward()
        ours = optimizer.canzona.clip_grad_norm_(1.0, norm_type=order)
        theirs = nn.utils.clip_grad_norm_(plain.parameters(), 1.0, norm_type=order)
        if not torch.allclose(ours, theirs, rtol=1e-5, atol=0.0):
            wrong.append(f"order {order}: {ours} for {theirs}")
    return wrong


@pytest.mark.ranks
def test_norms_of_any_order_of_what_is_cut() -> None:
    assert run(2, cut_ones) == [[]] * 2
