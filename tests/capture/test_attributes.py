"""Attributes of an optimizer between steps: what a change of one costs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import canzona_compile
from canzona_compile.capture import templates
from canzona_compile.rehearsal.rehearsal import Habits, rehearse
from canzona_compile.replica.watch import MOST_REHEARSALS, ChangeWatch
from tests.harness.pairs import feed, muon, parameters


def rehearsals(edit: Any, monkeypatch: pytest.MonkeyPatch) -> int:
    """How often twelve steps rehearse an optimizer that a user edits before each."""
    calls: list[Habits] = []

    def counted(*args: Any) -> Habits:
        calls.append(calls[0] if calls else rehearse(*args))  # no edit changes what one finds
        return calls[-1]

    monkeypatch.setattr(templates, "rehearse", counted)
    optimizer: Any = muon(parameters([(6, 4)]))
    optimizer.log, optimizer.mode, optimizer.rate = [], "first", 0.5
    canzona_compile.wrap(optimizer)
    for step in range(12):
        feed(optimizer, step)
        edit(optimizer, step)
        optimizer.step()
    return len(calls)


def test_a_log_does_not_rehearse_on_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rehearsals(lambda o, step: o.log.append(torch.tensor(step)), monkeypatch) == 1 + MOST_REHEARSALS


def test_a_number_never_does(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rehearsals(lambda o, step: setattr(o, "rate", 0.1 * step), monkeypatch) == 1


def test_another_word_does(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rehearsals(lambda o, step: setattr(o, "mode", "last" if step > 5 else "first"), monkeypatch) == 2


def test_a_loaded_state_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch adds entries to the defaults then."""
    assert rehearsals(lambda o, step: step == 5 and o.load_state_dict(o.state_dict()), monkeypatch) == 1


ATOMS = st.sampled_from([0, 1, True, 1.0, -0.0, None, "a", float("nan"), torch.float32, 10**20])
VALUES = st.one_of(ATOMS, st.lists(ATOMS, max_size=2), st.tuples(ATOMS), st.dictionaries(st.sampled_from("ab"), ATOMS))


class AlwaysLooks(ChangeWatch):
    """Never takes the shortcut, so it finds every change."""

    def _as_before(self, counters: Any) -> bool:
        return False


@given(st.lists(st.tuples(st.sampled_from(["first", "last", "param"]), st.sampled_from(["", "a"]), VALUES), max_size=8))
def test_the_shortcut_misses_no_change(edits: list[tuple[str, str, Any]]) -> None:
    """Edits set or delete attributes of the optimizer and of its parameter, and set entries of dicts."""
    param = torch.nn.Parameter(torch.zeros(1))
    optimizer: Any = torch.optim.SGD([param], lr=0.1)
    optimizer.first, optimizer.last = {}, {}
    watches = [ChangeWatch(optimizer), AlwaysLooks(optimizer)]
    for watch in watches:
        watch.begin(())
    for name, key, value in edits:
        value, owner = copy.deepcopy(value), param if name == "param" else optimizer
        if isinstance(own := getattr(owner, name, None), dict) and key:
            own[key] = value
        elif hasattr(owner, name) and value is None:
            delattr(owner, name)
        else:
            setattr(owner, name, value)
        found, expected = (watch.changes(()) for watch in watches)
        assert found == expected
        assert [watch.changes(()) for watch in watches] == [(False, False)] * 2
