"""Whole rank programs with generated kernels, in Triton's interpreter, on real ranks: the plain optimizer's bits."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from collections.abc import Iterator

import pytest
import torch

import canzona_compile
from canzona_compile import planner
from canzona_compile.codegen.launch import GroupedKernel
from tests.layouts import Case, Laid, replicate_of
from tests.optimizers import RECIPES, Scheduler, param_groups, share_captures
from tests.ranks import run
from tests.test_parity import differences, plain_run

pytestmark = pytest.mark.ranks
STEPS = 3


@contextmanager
def generating() -> Iterator[None]:
    """Programs on CPU as they are on CUDA."""
    before = planner.generates
    planner.generates = lambda machine: True
    try:
        yield
    finally:
        planner.generates = before


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a rank found: other bits than the plain run, and launches per step of every generated kernel."""

    different: list[str]
    launches: dict[str, float]
    groups: int
    targets: list[str]


def train(recipe: str, cases: Sequence[Case], dtype: torch.dtype, **options: Any) -> Outcome:
    plain = plain_run(recipe, dtype)
    laid = Laid(plain.first, *cases)
    optimizer: Any = RECIPES[recipe].make(param_groups(RECIPES[recipe].groups, laid.params))
    with generating():
        canzona_compile.wrap(optimizer, replicate=replicate_of(*cases), **options)
        share_captures(optimizer)
        scheduler = Scheduler(optimizer)
        for step, values in enumerate(plain.grads):
            scheduler.set(step)
            for i, param in enumerate(laid.params):
                param.grad = laid.like_param(values[i], i)
            optimizer.step()
    state = optimizer.state_dict()["state"]
    momenta = [state[i]["momentum_buffer"] for i in range(len(laid.params))]
    different = [
        *differences("parameter", laid.params, plain.params, laid),
        *differences("momentum", momenta, plain.momenta, laid),
    ]
    step = optimizer.canzona.step
    kernels = {n: m for n, m in step.program.module.named_children() if isinstance(m, GroupedKernel)}
    steady = len(plain.grads) - 1
    targets = [str(n.target) for n in step.program.module.graph.nodes if n.op == "call_module"]
    return Outcome(different, {n: m.launches / steady for n, m in kernels.items()}, len(step.groups), targets)
