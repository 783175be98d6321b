"""Fixtures of the tools' tests."""

from __future__ import annotations

import os

import pytest

from canzona_compile.tools import processes
from tests.harness import nursery


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of tools come from the tests' fork server, which has imported torch and has its own standard error."""
    first = nursery.server().Process(target=os.getpid)
    first.start()  # waits until the server has imported everything, which is no part of any limit
    first.join()
    monkeypatch.setattr(processes, "START_METHOD", "forkserver")
