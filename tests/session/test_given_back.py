"""A plan that ends before its first step gives back the state that owners took over, whatever ends it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from canzona_compile.errors import CanzonaError
from canzona_compile.session.step_driver import StepDriver
from tests.harness.checkpointing import Run, once
from tests.harness.layouts import Case, local
from tests.harness.marks import crossed
from tests.harness.ranks import run

CASES = [("muon", Case("ddp", (2,))), ("soap", Case("fsdp", (2,))), ("objects", Case("ddp", (2,)))]
STEPS = 2  # before the plan that ends


def plan_anew(part: Run, case: Case, way: str) -> Run:
    """What makes the next step plan: nothing was lost so far."""
    if way == "load":
        part.optimizer.load_state_dict(copy.deepcopy(part.optimizer.state_dict()))
    elif way == "group":
        added: Any = torch.ones(4, 4)
        if case.layout == "fsdp":
            added = distribute_tensor(added, init_device_mesh("cpu", (2,)), [Shard(0)])
        part.optimizer.add_param_group({"params": [nn.Parameter(added)]})
    else:
        saved = copy.deepcopy(part.optimizer.state_dict())
        other = Run(part.name, case)
        for mine, its in zip(other.laid.params, part.laid.params, strict=True):
            local(mine).data.copy_(local(its))
        other.optimizer.load_state_dict(saved)
        return other
    return part


def failing(mishap: str) -> Any:
    def choose_variants(self: StepDriver) -> None:
        if mishap == "interrupt":
            raise KeyboardInterrupt
        if dist.get_rank() == 1:
            raise ValueError("no variant")

    return choose_variants


def end_early(name: str, case: Case, way: str, mishap: str) -> tuple[str, list[str]]:
    """What the step said, and what differs from the plain run then and later."""
    part = Run(name, case)
    part.steps(0, STEPS)
    part = plan_anew(part, case, way)
    part.feed(STEPS)
    if mishap == "gradient" and dist.get_rank() == 1:
        part.laid.params[1].grad = None
    own = StepDriver.choose_variants
    if mishap != "gradient":
        StepDriver.choose_variants = failing(mishap)  # type: ignore[method-assign]
    said = ""
    try:
        part.optimizer.step()
    except (CanzonaError, KeyboardInterrupt) as error:
        said = f"{type(error).__name__}: {error}"
    finally:
        StepDriver.choose_variants = own  # type: ignore[method-assign]
    wrong = part.differs(STEPS)
    try:
        part.steps(STEPS, STEPS + 2)
        wrong += part.differs(STEPS + 2)
    except CanzonaError as error:
        wrong.append(error.problem)
    return said, wrong


@pytest.mark.parametrize(("case", "way"), crossed(CASES, ["load", "group", "resume"]), ids=str)
def test_a_gradient_is_missing_on_one_rank(case: tuple[str, Case], way: str) -> None:
    for said, wrong in run(2, end_early, *case, way, "gradient", after=once(case[0])):
        assert said.startswith("InvalidGradient"), said
        assert wrong == []


@pytest.mark.parametrize("case", CASES, ids=str)
def test_one_rank_cannot_choose_its_code(case: tuple[str, Case]) -> None:
    for said, wrong in run(2, end_early, *case, "load", "error", after=once(case[0])):
        assert "no variant" in said
        assert wrong == []


def test_an_interrupt() -> None:
    """The state is there; but ranks that were interrupted may wait for one another in vain."""
    for said, wrong in run(2, end_early, *CASES[0], "load", "interrupt", fresh=True, after=once("muon")):
        assert said.startswith("KeyboardInterrupt")
        assert len(wrong) == 1
        assert "an earlier step failed midway" in wrong[0]
