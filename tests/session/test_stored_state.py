"""State in 8 and 16 bits, and in host memory: the bits of the plain optimizer whose state is rounded, on any layout."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.optim import AdamW, Muon, Optimizer

import canzona_compile
from canzona_compile.optimizers import KLSOAP, SOAP, NorMuon, Shampoo
from canzona_compile.optimizers import Muon as StackMuon
from tests.data_parallel.runs import alone, compare
from tests.harness.layouts import ALONE, Case
from tests.harness.marks import full
from tests.harness.pairs import Pair
from tests.harness.ranks import run

MAKERS: dict[str, Callable[[list[Any]], Optimizer]] = {
    "muon": lambda params: Muon(params, lr=0.1),
    "stacks": lambda params: StackMuon(params, lr=0.1),
    "soap": lambda params: SOAP(params, lr=0.01, every=2),
    "kl-soap": lambda params: KLSOAP(params, lr=0.01, every=2),
    "shampoo": lambda params: Shampoo(params, lr=0.01, every=2),
    "normuon": lambda params: NorMuon(params, lr=0.01),
    "adamw": lambda params: AdamW(params, lr=0.01),
}
INT8 = {"momentum_buffer": "int8"}
MEANS = {"momentum_buffer": "int8", "second_moment": "bfloat16 cpu"}
ADAM = {"exp_avg": "int8 cpu", "exp_avg_sq": "bfloat16"}
FLOAT = torch.float32
SHAPES = ((12, 200), (200, 12), (6, 6))
STACKS = ((4, 6, 130), (6, 8))
# Of (6, 256), two ranks cut columns between blocks; of (8, 200) within one, so that the owner stores them.
COLUMNS = ((6, 256), (8, 200))

WAYS = [
    ("muon", INT8, SHAPES, Case("fsdp", (2,))),
    ("muon", INT8, SHAPES, ALONE),
    ("muon", INT8, COLUMNS, Case("fsdp_columns", (2,))),
    ("muon", INT8, SHAPES, Case("ddp", (2,))),
    ("muon", {"*": "int8 cpu"}, ((7, 9), (1, 130), (5, 3)), Case("fsdp", (4,))),
    ("muon", INT8, COLUMNS, Case("tp_columns", (2,))),
    ("muon", INT8, SHAPES, Case("hsdp", (2, 2))),
    ("muon", INT8, SHAPES, Case("fsdp_tp", (2, 2))),
    ("muon", "cpu", SHAPES, Case("fsdp", (2,))),
    ("stacks", INT8, STACKS, Case("fsdp", (2,))),
    ("normuon", MEANS, SHAPES, Case("fsdp", (2,))),
    ("soap", "bfloat16", SHAPES, Case("fsdp", (2,))),
    ("soap", "cpu", SHAPES, Case("ddp", (2,))),
    ("kl-soap", "bfloat16 cpu", SHAPES, Case("fsdp", (2,))),
    ("shampoo", {"momentum_buffer": "int8", "*": "bfloat16"}, SHAPES, Case("fsdp", (2,))),
    ("adamw", ADAM, SHAPES, Case("fsdp", (2,))),
    ("adamw", "bfloat16", ((5, 3), (3, 130)), Case("fsdp", (2,))),
]


def trained(name: str, state: Any, shapes: Any, case: Case, strategy: str = "owner") -> list[str]:
    """What differs from the plain optimizer whose state is rounded; first steps, steady ones, a missing gradient."""
    pair = Pair(
        MAKERS[name], shapes, None if case is ALONE else case, state=state, strategy=strategy, captures_anew=True
    )
    canzona_compile.round_state(pair.plain, state)
    pair.go(3)
    wrong = pair.different()
    pair.feed(0)
    pair.take()
    pair.go(2)
    return wrong + pair.different()


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("name", "state", "shapes", "case"), [WAYS[0], WAYS[1], WAYS[2], *(full(*w) for w in WAYS[3:])]
)
def test_the_bits_of_rounded_state(name: str, state: Any, shapes: Any, case: Case) -> None:
    if case is ALONE:
        assert trained(name, state, shapes, case) == []
        return
    assert run(case.world, trained, name, state, shapes, case) == [[]] * case.world


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("make", "state", "options"),
    [
        ("muon and adamw", {"momentum_buffer": "int8", "exp_avg*": "bfloat16"}, {}),
        full("muon and adamw", "cpu", {"gather": "forward"}),
        full("soap", "bfloat16 cpu", {"gather": "forward"}),
        full("shampoo", {"momentum_buffer": "int8", "*": "bfloat16"}, {}),
    ],
)
def test_under_zero1(make: str, state: Any, options: dict[str, Any]) -> None:
    found = run(
        2, compare, make, 5, ddp=True, bucket_bytes=40_000, state=state, after=partial(alone, make, FLOAT), **options
    )
    assert found == [[], []]
