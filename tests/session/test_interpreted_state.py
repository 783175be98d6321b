"""State of interpreted tasks, which only their owner has: shown on all ranks, and not lost in a new plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import canzona_compile
from tests.harness.layouts import Case, Laid, full
from tests.harness.optimizers import share_captures
from tests.harness.pairs import params_of, same_bits
from tests.harness.ranks import run
from tests.harness.toy_optimizers import HostReading, ObjectKeeping

KINDS: dict[str, type[Optimizer]] = {"host reading": HostReading, "object keeping": ObjectKeeping}


def leaves(state: dict[int, dict[str, Any]]) -> dict[tuple[int, str], Any]:
    """Of all parameters; of an object in the state its attributes."""
    found: dict[tuple[int, str], Any] = {}
    for i, own in state.items():
        for name, value in own.items():
            parts = {"": value} if isinstance(value, Tensor | int | float) else vars(value)
            found |= {(i, f"{name}.{attribute}"): part for attribute, part in parts.items()}
    return found


def train(kind: str, layout: str) -> None:
    random = torch.Generator().manual_seed(0)
    values = [torch.randn(12, 8, generator=random) for _ in range(5)]
    laid = Laid(values, Case(layout, (2,)))
    make: Any = KINDS[kind]
    plain = make([nn.Parameter(v.clone()) for v in values[:3]], lr=0.1)
    wrapped: Any = canzona_compile.wrap(make(laid.params[:3], lr=0.1), strategy="owner")
    share_captures(wrapped)
    for step in range(6):
        if step == 3:  # a new plan, in which tasks may have other owners
            plain.add_param_group({"params": [nn.Parameter(v.clone()) for v in values[3:]]})
            wrapped.add_param_group({"params": laid.params[3:]})
        for i, param in enumerate(params_of(plain)):
            param.grad = torch.randn(12, 8, generator=random) * (i + 1)
            laid.params[i].grad = laid.like_param(param.grad, i)
        plain.step()
        wrapped.step()
        mine, yours = (leaves(o.state_dict()["state"]) for o in (wrapped, plain))
        assert mine.keys() == yours.keys()
        assert [key for key in yours if not same_bits(mine[key], yours[key])] == []
    assert all(same_bits(full(a), b.detach()) for a, b in zip(laid.params, params_of(plain), strict=True))
    canzona_compile.unwrap(wrapped)
    assert leaves(wrapped.state_dict()["state"]).keys() == leaves(plain.state_dict()["state"]).keys()


@pytest.mark.ranks
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["fsdp", "tp_columns"])
def test_of_every_rank(kind: str, layout: str) -> None:
    run(2, train, kind, layout)
