"""Attributes of an optimizer between steps: what a change of one costs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import canzona_compile
from canzona_compile.rehearsal import ways
from canzona_compile.rehearsal.rehearsal import Rehearsal, rehearse
from canzona_compile.replica.attribute_watch import MOST_REHEARSALS
from tests.harness.pairs import feed, muon, parameters


def rehearsals(edit: Any, monkeypatch: pytest.MonkeyPatch) -> int:
    """How often twelve steps rehearse an optimizer that a user edits before each."""
    calls: list[Rehearsal] = []

    def counted(*args: Any) -> Rehearsal:
        calls.append(calls[0] if calls else rehearse(*args))  # no edit changes what one finds
        return calls[-1]

    monkeypatch.setattr(ways, "rehearse", counted)
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
