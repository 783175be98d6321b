"""Optimizers and edits that hypothesis makes up: whatever a step reads and whenever, it is followed or refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.optim import Optimizer

from tests.harness.toy_optimizers import cube
from tests.harness.training import ALONE
from tests.harness.trap_runs import DIFFERENT, verdict
from tests.harness.traps.trap import Params, Trap

OUTSIDE = {"number": 1.0}
READS = (
    "nothing",
    "attribute",
    "global",
    "index",
    "number of parameters",
    "rate of first group",
    "largest rate",
    "mark of parameter",
    "own norm",
    "norm of all",
    "own count",
    "value of neighbour",
)
EDITS = ("none", "attribute", "global", "rate", "mark", "clear state", "halve state", "drop gradient", "huge gradient")
STEPS = 44


@dataclass(frozen=True, slots=True)
class Habit:
    """What a step reads on some steps.

    Attributes:
        read: one of READS.
        start, period: it reads on step `start` and every `period` steps after that.
        writes: whether it also changes what it reads, if that is a number outside of the state.
    """

    read: str
    start: int
    period: int
    writes: bool

    def due(self, step: int) -> bool:
        return step >= self.start and (step - self.start) % self.period == 0


class MadeUp(Optimizer):
    """Scales a cube, or the gradient itself, by what its habits read."""

    def __init__(self, params: Params, habits: tuple[Habit, ...], elementwise: bool, on_host: bool) -> None:
        middle = len(params) // 2
        super().__init__([{"params": params[:middle]}, {"params": params[middle:], "lr": 0.07}], {"lr": 0.1})
        self.habits, self.elementwise, self.on_host, self.number = habits, elementwise, on_host, 1.0
        OUTSIDE["number"] = 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for i, param in enumerate(group["params"]):
                if param.grad is None:
                    continue
                state = self.state[param]
                count = state["count"] = state.get("count", 0) + 1
                update = param.grad * 0.1 if self.elementwise else cube(param.grad)
                if self.on_host and update.sum().item() == 12345.0:
                    continue
                for habit in self.habits:
                    if habit.due(count):
                        update = update * self.read(habit, group, i, param)
                param.sub_(update * group["lr"])

    def read(self, habit: Habit, group: dict[str, Any], place: int, param: Tensor) -> Any:
        match habit.read:
            case "attribute":
                self.number += 0.25 * habit.writes
                return self.number
            case "global":
                OUTSIDE["number"] += 0.25 * habit.writes
                return OUTSIDE["number"]
            case "index":
                return 1.0 + place
            case "number of parameters":
                return 1.0 / len(group["params"])
            case "rate of first group":
                return self.param_groups[0]["lr"]
            case "largest rate":
                return max(g["lr"] for g in self.param_groups)
            case "mark of parameter":
                return getattr(param, "lr_mul", 1.0)
            case "own norm":
                assert param.grad is not None
                return 1.0 / (1.0 + param.grad.norm())
            case "norm of all":
                grads = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
                return 1.0 / (1.0 + sum(grad.square().sum() for grad in grads))
            case "own count":
                return 1.0 / self.state[param]["count"]
            case "value of neighbour":
                return 1.0 + group["params"][place - 1].detach().sum().abs()
        return 1.0


def edit_of(edits: dict[int, str]) -> Any:
    """What the user does before a step."""

    def edit(optimizer: Any, params: Params, step: int) -> None:
        match edits.get(step, "none"):
            case "attribute":
                optimizer.number = 0.5 + step
            case "global":
                OUTSIDE["number"] = 0.5 + step
            case "rate":
                optimizer.param_groups[0]["lr"] *= 0.5
            case "mark":
                params[1].lr_mul = 0.5 + step
            case "clear state":
                optimizer.state.clear()
            case "halve state":
                for state in optimizer.state.values():
                    state["count"] //= 2
            case "drop gradient":
                params[-1].grad = None
            case "huge gradient":
                params[0].grad.mul_(1e4)

    return edit


habits = st.builds(Habit, st.sampled_from(READS), st.integers(1, 40), st.integers(1, 40), st.booleans())
steps_and_edits = st.dictionaries(st.integers(1, STEPS - 1), st.sampled_from(EDITS), max_size=3)


def check(own: tuple[Habit, ...], edits: dict[int, str], elementwise: bool, on_host: bool) -> None:
    def make(params: Params) -> Optimizer:
        return MadeUp(params, own, elementwise, on_host)

    last = max([habit.start + habit.period for habit in own] + [step + 1 for step in edits] + [2])
    steps = min(STEPS, last + 2)
    trap = Trap("made-up", "made up", make, "either", steps=steps, edit=edit_of(edits), shapes=((3, 2), (2, 3), (3, 2)))
    found = verdict(trap, ALONE)
    note(str(found))
    assert found.kind != DIFFERENT


@given(st.lists(habits, min_size=1, max_size=2).map(tuple), steps_and_edits, st.booleans(), st.just(True))
@settings(max_examples=2, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_few(own: tuple[Habit, ...], edits: dict[int, str], elementwise: bool, on_host: bool) -> None:
    check(own, edits, elementwise, on_host)


@pytest.mark.full
@given(st.lists(habits, min_size=1, max_size=2).map(tuple), steps_and_edits, st.booleans(), st.booleans())
@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_many(own: tuple[Habit, ...], edits: dict[int, str], elementwise: bool, on_host: bool) -> None:
    check(own, edits, elementwise, on_host)
