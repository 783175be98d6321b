"""Every layout, number of ranks and dtype gives the bits of the plain optimizer on one device."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

import canzona_compile
from tests.layouts import Case, Laid, full, local, replicate_of
from tests.optimizers import (
    RECIPES,
    Scheduler,
    param_groups,
    shapes_of,
    share_captures,
)
from tests.ranks import run

STEPS = 12
DTYPES = [
    pytest.param(torch.float32, id="fp32"),
    pytest.param(torch.bfloat16, id="bf16"),
]


# -- on the ranks ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Run:
    """What plain training gives: all of it follows from the seed."""

    first: tuple[Tensor, ...]
    grads: tuple[tuple[Tensor, ...], ...]  # by step
    params: tuple[Tensor, ...]
    momenta: tuple[Tensor, ...]


@functools.cache
def plain_run(recipe: str, dtype: torch.dtype) -> Run:
    """The plain optimizer on full tensors."""
    random = torch.Generator().manual_seed(5)

    def draw(scale: float) -> tuple[Tensor, ...]:
        shapes = shapes_of(RECIPES[recipe].groups)
        return tuple((torch.randn(s, generator=random) * scale).to(dtype) for s in shapes)

    first = draw(0.1)
    grads = tuple(draw(1e-3) for _ in range(STEPS))
    params = [torch.nn.Parameter(v.clone()) for v in first]
    optimizer = RECIPES[recipe].make(param_groups(RECIPES[recipe].groups, params))
    scheduler = Scheduler(optimizer)
    for step, values in enumerate(grads):
        scheduler.set(step)
        for param, grad in zip(params, values, strict=True):
            param.grad = grad.clone()
        optimizer.step()
    momenta = tuple(optimizer.state[p]["momentum_buffer"] for p in params)
    return Run(first, grads, tuple(p.detach() for p in params), momenta)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a rank found after the last step.

    Attributes:
        different: what has other bits than the plain run: "parameter 3", "momentum 0".
        elements: of each parameter's fragment.
        report: of the wrapped optimizer.
    """

    different: list[str]
    elements: list[int]
    report: dict[str, Any]


def train(recipe: str, case: Case, dtype: torch.dtype, **options: Any) -> Outcome:
    """STEPS steps of the wrapped optimizer on this rank's fragments, fed the plain run's gradients."""
    plain = plain_run(recipe, dtype)
    laid = Laid(plain.first, case)
    optimizer = RECIPES[recipe].make(param_groups(RECIPES[recipe].groups, laid.params))
    canzona_compile.wrap(optimizer, replicate=replicate_of(case), **options)
    share_captures(optimizer)
    scheduler = Scheduler(optimizer)
    for step, values in enumerate(plain.grads):
        scheduler.set(step)
        for i, param in enumerate(laid.params):
            param.grad = laid.like_param(values[i], i)
        optimizer.step()
    different = differences(plain, laid, optimizer)
    elements = [index.numel() for index in laid.indices]
    return Outcome(different, elements, optimizer.canzona.report().to_dict())


def differences(plain: Run, laid: Laid, optimizer: Optimizer) -> list[str]:
    """Compare this rank's fragments, and what torch gathers from all of them."""
    state = optimizer.state_dict()["state"]
    found = []
    for i, param in enumerate(laid.params):
        for name, got, expected in (
            (f"parameter {i}", param, plain.params[i]),
            (f"momentum {i}", state[i]["momentum_buffer"], plain.momenta[i]),
        ):
            same = local(got).dtype == expected.dtype
            same &= torch.equal(local(got), laid.fragment(expected, i))
            same &= torch.equal(full(got), expected)
            if not same:
                found.append(name)
    return found


# -- layouts ---------------------------------------------------------------------------------------

LINES = ("fsdp", "fsdp_columns", "tp_rows", "tp_columns", "ddp", "replicated")
CASES = [
    *(Case(layout, (ranks,)) for ranks in (2, 3, 4, 8) for layout in LINES),
    *(Case(layout, mesh) for mesh in ((2, 2), (2, 4), (4, 2)) for layout in ("hsdp", "fsdp_tp", "tp_ddp")),
    Case("hsdp", (3, 1)),
    Case("fsdp_tp", (1, 3)),
    Case("both_dims", (2, 2)),
    Case("replicated_rows", (4, 2)),
    Case("hsdp_tp", (2, 2, 2)),
]


def check(outcomes: Sequence[Outcome]) -> None:
    assert [o.different for o in outcomes] == [[]] * len(outcomes)
    assert all(o.report["fallbacks"] == {} for o in outcomes)


@pytest.mark.ranks
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_layout(case: Case, dtype: torch.dtype) -> None:
    outcomes = run(case.world, train, "muon", case, dtype, strategy="owner")
    check(outcomes)
    report = outcomes[0].report
    assert {task["strategy"] for task in report["tasks"]} == {"owner"}
    assert len({task["owner"] for task in report["tasks"]}) == min(case.world, 9)
