"""Traps that hypothesis makes up: however state begins, is written and read, it is followed or refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, assume, given, note, settings
from hypothesis import strategies as st

from tests.harness.layouts import ALONE
from tests.harness.trap_runs import DIFFERENT, verdict
from tests.harness.traps.grammar import lines, nested, trap

ZEROS = "torch.zeros_like(param)"
BEGINNINGS = {  # `before` is the entry before, or None
    "zeros": ZEROS,
    "the gradient": "grad",
    "a clone of the gradient": "grad.clone()",
    "the parameter": "param.data",
    "a clone of the parameter": "param.detach().clone()",
    "zeros in float64": "torch.zeros_like(param, dtype=torch.float64)",
    "zeros in bfloat16": "torch.zeros_like(param, dtype=torch.bfloat16)",
    "sums of rows": "grad.sum(1)",
    "a tensor of no dims": "torch.zeros((), dtype=param.dtype)",
    "the gradient transposed": "grad.T",
    "a row of the entry before": f"before[0] if isinstance(before, Tensor) and before.ndim == 2 else {ZEROS}",
    "the entry before": f"before if isinstance(before, Tensor) else {ZEROS}",
    "a number": "0.0",
}
WRITES = {  # `now` is what the entry holds, `part` a gradient in its form
    "nothing": "pass",
    "lerp_": "if isinstance(now, Tensor):\n    now.lerp_(part, 0.1)",
    "a new tensor": "state[name] = 0.9 * now + part * 0.1",
    "the gradient's part": "state[name] = part",
    "mul_": "if isinstance(now, Tensor):\n    now.mul_(0.5)",
    "swapped with the entry before": (
        "if other in state and are_alike(now, state[other]):\n    state[name], state[other] = state[other], now"
    ),
    "a clone of itself": "if isinstance(now, Tensor):\n    state[name] = now.clone()",
    "a product with itself": (
        "if isinstance(now, Tensor) and now.ndim == 2:\n    state[name] = now - 0.1 * (now @ now.T @ now)"
    ),
}
EDITS = {
    "none": "pass",
    "rate": 'optimizer.param_groups[0]["lr"] *= 0.5',
    "drop gradient": "params[-1].grad = None",
    "reload": "optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))",
    "halve state": """
        for value in [value for state in optimizer.state.values() for value in state.values()]:
            if isinstance(value, Tensor):
                value.mul_(0.5)
    """,
    "clear state": "optimizer.state.clear()",
    "huge gradient": "params[0].grad.mul_(1e3)",
}
IN_PLACE = {"outside": "written_in_place = WrittenInPlace()", "every": "written_in_place(params, step)"}


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

    def begun(self, i: int) -> str:
        """Its first value, in Python."""
        return f'before = state.get("s{i - 1}")\nstate["s{i}"] = {BEGINNINGS[self.beginning]}'

    def used(self, i: int) -> str:
        """What a step does with it."""
        now = f'name, other = "s{i}", "s{i - 1}"\nnow = state[name]\npart = as_entry(grad, now)'
        write = nested(f'if state["count"] % {self.period} == 0:', now, WRITES[self.write])
        read = f'update = update + 0.1 * as_gradient(state["s{i}"], grad)'
        return lines(*((write, read) if self.early else (read, write)))


entries = st.builds(
    Entry, st.sampled_from(list(BEGINNINGS)), st.sampled_from(list(WRITES)), st.integers(1, 3), st.booleans()
)
several = st.lists(entries, min_size=1, max_size=3)
changes = st.dictionaries(st.integers(1, 11), st.sampled_from(list(EDITS)), max_size=3)


def check(own: list[Entry], edits: Mapping[int, str], elementwise: bool, in_place: bool) -> None:
    beginnings = {entry.beginning for entry in own}
    for edit in edits.values():
        # Torch casts loaded state to the dtype of the parameter, a wrapped optimizer to that which its code makes. What
        # holds the parameter itself runs as residents: their state is elsewhere, and is loaded as it was.
        casts = edit == "reload" and beginnings & {"zeros in float64", "zeros in bfloat16"}
        assume(not casts and not (edit in ("halve state", "reload") and "the parameter" in beginnings))
    begun = [entry.begun(i) for i, entry in enumerate(own)]
    made = trap(
        "made-up",
        "made up",
        "either",
        steps=max([5, *(step + 3 for step in edits)]),
        edit={step: EDITS[edit] for step, edit in edits.items() if not (in_place and edit == "drop gradient")},
        shapes=((3, 2), (2, 3)),
        param=lines(
            nested("if not state:", 'state["count"] = 0', *begun),
            'state["count"] += 1',
            f"update = {'grad * 0.5' if elementwise else 'cube(grad)'}",
            *[entry.used(i) for i, entry in enumerate(own)],
        ),
        times="1.0",
        **(IN_PLACE if in_place else {}),
    )
    found = verdict(made, ALONE)
    note(str(found))
    assert found.kind != DIFFERENT


@given(several, changes, st.booleans(), st.booleans())
@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_few(own: list[Entry], edits: Mapping[int, str], elementwise: bool, in_place: bool) -> None:
    check(own, edits, elementwise, in_place)


@pytest.mark.full
@given(several, changes, st.booleans(), st.booleans())
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_many(own: list[Entry], edits: Mapping[int, str], elementwise: bool, in_place: bool) -> None:
    check(own, edits, elementwise, in_place)
