"""Optimizers with state that hypothesis makes up: however it begins, is written and read, it is followed or refused."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, note, settings
from hypothesis import strategies as st
from tests.harness.traps.aliases import WrittenInPlace
from torch import Tensor
from torch.optim import Optimizer

from tests.harness.toy_optimizers import cube
from tests.harness.training import ALONE
from tests.harness.trap_runs import DIFFERENT, verdict
from tests.harness.traps.trap import Params, Trap

BEGINNINGS = (
    "zeros",
    "the gradient",
    "a clone of the gradient",
    "the parameter",
    "a clone of the parameter",
    "zeros in float64",
    "zeros in bfloat16",
    "sums of rows",
    "a tensor of no dims",
    "the gradient transposed",
    "a row of the entry before",
    "the entry before",
    "a number",
)
WRITES = (
    "nothing",
    "lerp_",
    "a new tensor",
    "the gradient's part",
    "mul_",
    "swapped with the entry before",
    "a clone of itself",
    "a product with itself",
)
EDITS = ("none", "rate", "drop gradient", "reload", "halve state", "clear state", "huge gradient")
STEPS = 12


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry of the state.

    Attributes:
        beginning: one of BEGINNINGS.
        write: one of WRITES: what a step makes of it.
        period: it is written every so many steps.
        early: whether the step writes it before it reads it.
    """

    beginning: str
    write: str
    period: int
    early: bool


class MadeUpState(Optimizer):
    """Adds what its state holds to a cube of the gradient, or to the gradient itself."""

    def __init__(self, params: Params, entries: tuple[Entry, ...], elementwise: bool) -> None:
        super().__init__(params, {"lr": 0.1})
        self.entries, self.elementwise = entries, elementwise

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.update(param, param.grad, group["lr"], self.state[param])

    def update(self, param: Tensor, grad: Tensor, lr: float, state: dict[str, Any]) -> None:
        if not state:
            state["count"] = 0
            for i, entry in enumerate(self.entries):
                state[f"s{i}"] = self.begun(entry, i, param, grad, state)
        state["count"] += 1
        update = grad * 0.5 if self.elementwise else cube(grad)
        for i, entry in enumerate(self.entries):
            if entry.early:
                self.write(entry, i, grad, state)
            update = update + 0.1 * as_gradient(state[f"s{i}"], grad)
            if not entry.early:
                self.write(entry, i, grad, state)
        param.sub_(update * lr)

    def begun(self, entry: Entry, i: int, param: Tensor, grad: Tensor, state: dict[str, Any]) -> Any:
        """Make the first value of an entry."""
        before = state.get(f"s{i - 1}")
        match entry.beginning:
            case "the gradient":
                return grad
            case "a clone of the gradient":
                return grad.clone()
            case "the parameter":
                return param.data
            case "a clone of the parameter":
                return param.detach().clone()
            case "zeros in float64":
                return torch.zeros_like(param, dtype=torch.float64)
            case "zeros in bfloat16":
                return torch.zeros_like(param, dtype=torch.bfloat16)
            case "sums of rows":
                return grad.sum(1)
            case "a tensor of no dims":
                return torch.zeros((), dtype=param.dtype)
            case "the gradient transposed":
                return grad.T
            case "a row of the entry before" if isinstance(before, Tensor) and before.ndim == 2:
                return before[0]
            case "the entry before" if isinstance(before, Tensor):
                return before
            case "a number":
                return 0.0
        return torch.zeros_like(param)

    def write(self, entry: Entry, i: int, grad: Tensor, state: dict[str, Any]) -> None:
        """Change an entry, if it is due."""
        name, other = f"s{i}", f"s{i - 1}"
        if state["count"] % entry.period:
            return
        now = state[name]
        part = as_entry(grad, now)
        match entry.write:
            case "lerp_" if isinstance(now, Tensor):
                now.lerp_(part, 0.1)
            case "a new tensor":
                state[name] = 0.9 * now + part * 0.1
            case "the gradient's part":
                state[name] = part
            case "mul_" if isinstance(now, Tensor):
                now.mul_(0.5)
            case "swapped with the entry before" if i and unlike(now, state[other]):
                state[name], state[other] = state[other], now
            case "a clone of itself" if isinstance(now, Tensor):
                state[name] = now.clone()
            case "a product with itself" if isinstance(now, Tensor) and now.ndim == 2:
                state[name] = now - 0.1 * (now @ now.T @ now)


def unlike(one: Any, other: Any) -> bool:
    """Whether two entries are tensors of one shape and dtype."""
    tensors = isinstance(one, Tensor) and isinstance(other, Tensor)
    return tensors and (one.shape, one.dtype) == (other.shape, other.dtype)


def as_gradient(entry: Any, grad: Tensor) -> Any:
    """Bring an entry into a form that can be added to a gradient."""
    if not isinstance(entry, Tensor):
        return entry
    if entry.ndim == 2 and entry.shape != grad.shape:
        return entry.T.to(grad.dtype)
    if entry.ndim == 1:
        return (entry[:, None] if len(entry) == grad.shape[0] else entry[None, :]).to(grad.dtype)
    return entry.to(grad.dtype)


def as_entry(grad: Tensor, entry: Any) -> Any:
    """Bring a gradient into the form of an entry."""
    if not isinstance(entry, Tensor):
        return float(entry) + 1.0
    if entry.ndim == 0:
        return grad.norm().to(entry.dtype)
    if entry.ndim == 1:
        return (grad.sum(1) if len(entry) == grad.shape[0] else grad.sum(0)).to(entry.dtype)
    return (grad if entry.shape == grad.shape else grad.T).to(entry.dtype)


class Edits:
    """What the user does before steps."""

    def __init__(self, edits: dict[int, str], in_place: bool) -> None:
        self.edits, self.in_place = edits, WrittenInPlace() if in_place else None

    def __call__(self, optimizer: Any, params: Params, step: int) -> None:
        """Do it."""
        match self.edits.get(step, "none"):
            case "rate":
                optimizer.param_groups[0]["lr"] *= 0.5
            case "drop gradient" if self.in_place is None:
                params[-1].grad = None
            case "reload":
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            case "halve state":
                for state in optimizer.state.values():
                    for value in state.values():
                        if isinstance(value, Tensor):
                            value.mul_(0.5)
            case "clear state":
                optimizer.state.clear()
            case "huge gradient":
                params[0].grad.mul_(1e3)
        if self.in_place is not None:
            self.in_place(optimizer, params, step)


entries = st.builds(Entry, st.sampled_from(BEGINNINGS), st.sampled_from(WRITES), st.integers(1, 3), st.booleans())
several = st.lists(entries, min_size=1, max_size=3).map(tuple)
edits_by_step = st.dictionaries(st.integers(1, STEPS - 1), st.sampled_from(EDITS), max_size=3)


def check(own: tuple[Entry, ...], edits: dict[int, str], elementwise: bool, in_place: bool) -> None:
    def make(params: Params) -> Optimizer:
        return MadeUpState(params, own, elementwise)

    beginnings = {entry.beginning for entry in own}
    for edit in edits.values():
        # Torch casts loaded state to the dtype of the parameter, a wrapped optimizer to that which its code makes. What
        # holds the parameter itself runs as residents: their state is elsewhere, and is loaded as it was.
        casts = edit == "reload" and beginnings & {"zeros in float64", "zeros in bfloat16"}
        assume(not casts and not (edit in ("halve state", "reload") and "the parameter" in beginnings))
    steps = max([5, *(step + 3 for step in edits)])
    trap = Trap(
        "made-up-state", "made up", make, "either", steps=steps, edit=Edits(edits, in_place), shapes=((3, 2), (2, 3))
    )
    found = verdict(trap, ALONE)
    note(str(found))
    assert found.kind != DIFFERENT


@given(several, edits_by_step, st.booleans(), st.booleans())
@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_few_states(own: tuple[Entry, ...], edits: dict[int, str], elementwise: bool, in_place: bool) -> None:
    check(own, edits, elementwise, in_place)


@pytest.mark.full
@given(several, edits_by_step, st.booleans(), st.booleans())
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_many_states(own: tuple[Entry, ...], edits: dict[int, str], elementwise: bool, in_place: bool) -> None:
    check(own, edits, elementwise, in_place)
