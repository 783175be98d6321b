"""Whole rank programs with generated kernels, in Triton's interpreter, on real ranks: the plain optimizer's bits."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import canzona_compile
from tests.codegen.pointwise import generating, kernels_of
from tests.end_to_end.test_parity import differences
from tests.harness.layouts import Case, Laid, replicate_of
from tests.harness.optimizers import GroupSpec, Scheduler, muon, param_groups, shapes_of, share_captures
from tests.harness.ranks import run

pytest.importorskip("triton")
pytestmark = pytest.mark.ranks

STEPS = 3  # the first is eager
# Two that batch and are aligned, and one that ranks cannot share evenly, with numbers of its own.
GROUPS = (
    GroupSpec(((64, 48),) * 2, {"nesterov": True}),
    GroupSpec(((5, 40),), {"nesterov": False, "adjust_lr_fn": "match_rms_adamw", "lr": 3e-3}),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a rank found: bits other than the plain run's, launches per step of every kernel, micro-groups."""

    different: list[str]
    launches: dict[str, float]
    groups: int


@functools.cache
def plain_run(dtype: torch.dtype) -> tuple[list[Tensor], list[list[Tensor]], list[Tensor], list[Tensor]]:
    """Of plain Muon: first parameters, gradients by step, last parameters, last momenta."""
    random = torch.Generator().manual_seed(3)

    def draw(scale: float) -> list[Tensor]:
        return [(torch.randn(s, generator=random) * scale).to(dtype) for s in shapes_of(GROUPS)]

    first, grads = draw(0.1), [draw(1e-3) for _ in range(STEPS)]
    params = [torch.nn.Parameter(v.clone()) for v in first]
    optimizer = muon(param_groups(GROUPS, params))
    scheduler = Scheduler(optimizer)
    for step, values in enumerate(grads):
        scheduler.set(step)
        for param, grad in zip(params, values, strict=True):
            param.grad = grad.clone()
        optimizer.step()
    return first, grads, [p.detach() for p in params], [optimizer.state[p]["momentum_buffer"] for p in params]


def train(case: Case, dtype: torch.dtype, options: dict[str, Any]) -> Outcome:
    first, grads, params, momenta = plain_run(dtype)
    laid = Laid(first, case)
    optimizer: Any = muon(param_groups(GROUPS, laid.params))
    with generating():
        canzona_compile.wrap(optimizer, replicate=replicate_of(case), **options)
        share_captures(optimizer)
        scheduler = Scheduler(optimizer)
        for step, values in enumerate(grads):
            scheduler.set(step)
            for i, param in enumerate(laid.params):
                param.grad = laid.like_param(values[i], i)
            optimizer.step()
    state = optimizer.state_dict()["state"]
    found = [state[i]["momentum_buffer"] for i in range(len(params))]
    different = [*differences("parameter", laid.params, params, laid), *differences("momentum", found, momenta, laid)]
    launches = {name: kernel.launches / (STEPS - 1) for name, kernel in kernels_of(optimizer).items()}
    assert optimizer.canzona.step.program.eager == {}
    return Outcome(different, launches, len(optimizer.canzona.step.groups))


@pytest.mark.parametrize(
    ("case", "dtype", "options", "stages"),
    [
        (Case("fsdp", (4,)), torch.float32, {"strategy": "owner", "micro_groups": 2}, "prepare unpack pack apply"),
        (Case("fsdp", (4,)), torch.bfloat16, {"strategy": "owner"}, "prepare unpack pack apply"),
        (Case("hsdp", (2, 2)), torch.float32, {"strategy": "owner"}, "prepare unpack pack forward apply"),
        (Case("tp_columns", (2,)), torch.float32, {"strategy": "owner"}, "prepare unpack pack apply"),
        (Case("fsdp", (2,)), torch.float32, {"strategy": "replicated"}, "prepare unpack apply"),
        (Case("ddp", (2,)), torch.float32, {"strategy": "owner"}, "pack apply"),  # gradients are there already
    ],
    ids=lambda value: str(value) if isinstance(value, Case | torch.dtype) else "",
)
def test_muon(case: Case, dtype: torch.dtype, options: dict[str, Any], stages: str) -> None:
    """Equal bits; per micro-group and step one launch for each stage that there is on a rank."""
    outcomes = run(case.world, train, case, dtype, options)
    assert [o.different for o in outcomes] == [[]] * case.world
    for outcome in outcomes:
        assert set(outcome.launches.values()) == {1.0}
        for group in range(outcome.groups):
            assert f"g{group}_apply" in outcome.launches
    seen = {name.split("_", 1)[1] for outcome in outcomes for name in outcome.launches}
    assert seen == set(stages.split())
