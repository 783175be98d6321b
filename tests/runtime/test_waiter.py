"""Waiting for collectives on the host: patience that ends is no failure, whatever the error says."""

from __future__ import annotations

import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from canzona_compile.errors import CanzonaError
from canzona_compile.runtime import process_groups, waiter
from canzona_compile.runtime.waiter import Waiter

CPU = torch.device("cpu")
PATIENCE = timedelta(milliseconds=20)


@pytest.fixture(autouse=True)
def little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiter, "PATIENCE", PATIENCE)


class Work:
    """A collective that ends after some waits: well, or with an error, and with words that say nothing of use."""

    def __init__(self, waits: int, error: str = "", ends_late: bool = False) -> None:
        self.waits, self.error, self.ends_late, self.calls = waits, error, ends_late, 0

    def is_completed(self) -> bool:
        return self.calls > self.waits or (self.ends_late and self.calls == self.waits)

    def wait(self, *_: Any) -> bool:
        self.calls += 1
        if self.calls <= self.waits:
            time.sleep(PATIENCE.total_seconds())
            raise RuntimeError("not yet")
        if self.error:
            raise RuntimeError(f"{self.error}\nand a trace")
        return True


class Listener:
    """An agreement that counts how often it is asked, and hears a call or not."""

    def __init__(self, call: CanzonaError | None = None) -> None:
        self.call, self.heard, self.failures = call, 0, 0

    def listen(self) -> None:
        self.heard += 1
        if self.call is not None:
            raise self.call

    def fail(self, error: CanzonaError) -> None:
        self.failures += 1

    def absent(self) -> list[int]:
        return []


def wait(work: Work, listener: Listener) -> None:
    listeners: Any = [listener]
    collective: Any = work
    Waiter(listeners, CPU).wait(collective)


@pytest.mark.parametrize("waits", [0, 1, 3])
def test_it_listens_whenever_patience_ends(waits: int) -> None:
    listener = Listener()
    wait(Work(waits), listener)
    assert (listener.heard, listener.failures) == (waits, 0)


def test_a_collective_that_ends_just_after_patience_has_not_failed() -> None:
    listener = Listener()
    wait(Work(1, ends_late=True), listener)
    assert (listener.heard, listener.failures) == (0, 0)


@pytest.mark.parametrize("error", ["Connection closed by peer", "Timed out waiting 1800000ms"])
def test_a_failure_is_told_to_all(error: str) -> None:
    """An error of the collective itself that speaks of a timeout, too."""
    listener = Listener()
    with pytest.raises(CanzonaError, match=f"a collective of this step failed: {error}$|{error}\n"):
        wait(Work(0, error), listener)
    assert listener.failures == 1


def test_a_call_ends_the_wait() -> None:
    listener = Listener(CanzonaError("rank 1 cannot run this step"))
    with pytest.raises(CanzonaError, match="rank 1"):
        wait(Work(9), listener)
    assert (listener.heard, listener.failures) == (1, 1)


def test_a_wait_that_fails_at_once_is_no_patience_that_ends() -> None:
    """Work of gloo's reduce-scatter is not complete after a failure, and raises on every wait."""

    class Broken(Work):
        def is_completed(self) -> bool:
            return False

    listener = Listener()
    with pytest.raises(CanzonaError, match="connection reset"):
        wait(Broken(0, "connection reset"), listener)
    assert listener.failures == 1


@pytest.mark.parametrize(("backend", "heard"), [("gloo", 3), ("nccl", 0)])
def test_the_backend_says_who_waits(backend: str, heard: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that share a GPU use gloo: the host waits, and listens meanwhile. With NCCL the stream waits."""

    class Backend:
        def name(self) -> str:
            return backend

    group = SimpleNamespace(_get_backend=lambda device: Backend(), _device_types=[torch.device("cuda")])
    monkeypatch.setattr(process_groups.dist, "group", SimpleNamespace(WORLD=group))
    listener, work = Listener(), Work(3 if heard else 0)
    listeners: Any = [listener]
    collective: Any = work
    Waiter(listeners, torch.device("cuda")).wait(collective)
    assert (listener.heard, work.calls) == (heard, heard + 1)
