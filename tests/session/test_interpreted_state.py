"""State of interpreted tasks, which only their owner has: shown on all ranks, and not lost in a new plan."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from torch.optim import Optimizer

import canzona_compile
from tests.harness.layouts import Case
from tests.harness.pairs import Pair, parameters
from tests.harness.ranks import run
from tests.harness.toy_optimizers import HostReading
from tests.harness.toys import ObjectKeeping

KINDS: dict[str, type[Optimizer]] = {"host reading": HostReading, "object keeping": ObjectKeeping}


def train(kind: str, layout: str) -> None:
    make: Any = partial(KINDS[kind], lr=0.1)
    pair = Pair(lambda params: make(params[:3]), ((12, 8),) * 5, Case(layout, (2,)), strategy="owner")
    pair.steps(3)
    for optimizer, params in zip(pair.both, (parameters(((12, 8),) * 5), pair.laid.params), strict=True):
        optimizer.add_param_group({"params": params[3:]})  # a new plan, in which tasks may have other owners
    pair.steps(3)
    canzona_compile.unwrap(pair.wrapped)
    assert [state.keys() for state in pair.wrapped.state.values()] == [s.keys() for s in pair.plain.state.values()]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["fsdp", "tp_columns"])
def test_of_every_rank(kind: str, layout: str) -> None:
    run(2, train, kind, layout)
