"""Ctrl-C in captures: it acts soon, and leaves nothing of ours in the process."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import canzona_compile
from canzona_compile.compat.interrupts import interrupted_here, interrupts_later, uninterrupted
from canzona_compile.compat.torch_private import TorchDispatchMode, dispatch_modes
from tests.harness.interrupted import begun
from tests.harness.marks import also, full
from tests.harness.pairs import feed, params_of

ROOT = Path(__file__).parents[2]


@pytest.fixture
def heard() -> Iterator[list[int]]:
    """What a handler of the user hears."""
    found: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _frame: found.append(number))
    yield found
    signal.signal(signal.SIGINT, before)


def test_it_waits_for_the_end_of_the_outermost_context(heard: list[int]) -> None:
    with interrupts_later():
        with interrupts_later():
            signal.raise_signal(signal.SIGINT)
        assert heard == []
        signal.raise_signal(signal.SIGINT)  # a second one is the same wish
    assert heard == [signal.SIGINT]


def test_it_acts_where_the_work_asks(heard: list[int]) -> None:
    with interrupts_later():
        interrupted_here()
        signal.raise_signal(signal.SIGINT)
        interrupted_here()
        assert heard == [signal.SIGINT]
    assert heard == [signal.SIGINT]
    interrupted_here()
    signal.raise_signal(signal.SIGINT)
    assert len(heard) == 2


def test_an_error_passes_and_the_handler_is_back(heard: list[int]) -> None:
    given = signal.getsignal(signal.SIGINT)

    @uninterrupted
    def fails() -> None:
        signal.raise_signal(signal.SIGINT)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fails()
    assert heard == [signal.SIGINT]
    assert signal.getsignal(signal.SIGINT) is given


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_what_is_no_function_stays(handler: Any) -> None:
    before = signal.signal(signal.SIGINT, handler)
    try:
        with interrupts_later():
            assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_handler_that_a_step_sets_stays(heard: list[int]) -> None:
    own = signal.default_int_handler
    with interrupts_later():
        signal.signal(signal.SIGINT, own)
    assert signal.getsignal(signal.SIGINT) is own


@pytest.mark.parametrize("number", [0, 30, *also([1, 2, 10])])
def test_a_mode_that_is_being_entered_does_not_stay(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal comes where a mode is entered, and before anything could leave it."""
    entered = itertools.count()
    original = TorchDispatchMode.__enter__

    def enter(mode: TorchDispatchMode) -> Any:
        found = original(mode)
        if next(entered) == number:
            signal.raise_signal(signal.SIGINT)
        return found

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        optimizer = canzona_compile.wrap(begun("dispatched"))
        feed(optimizer, 0)
        monkeypatch.setattr(TorchDispatchMode, "__enter__", enter)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
        monkeypatch.undo()
        found = dispatch_modes()
        for mode in reversed(found):
            TorchDispatchMode.__exit__(mode, None, None, None)
        assert found == []
        plain = begun("dispatched")
        for own in (plain, optimizer):
            feed(own, 0)
            own.step()
        assert all(map(torch.equal, params_of(plain), params_of(optimizer)))
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("kind", ["soap", full("muon"), full("dispatched")])
def test_a_storm_leaves_nothing_behind(kind: str) -> None:
    called = [sys.executable, "-m", "tests.harness.interrupted", kind]
    done = subprocess.run(called, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (0, "equal\n"), done.stderr[-3000:]
