"""A plugin of pytest that writes the result of each test to a file when it is known: `--record FILE`.

What pytest says at its end is lost if the machine or the time ends first.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that names the file."""
    parser.addoption("--record", type=Path, help="write the result of each test to this file, a line of JSON each")


def pytest_configure(config: pytest.Config) -> None:
    """Record in the process that hears of all results: workers of pytest-xdist hand theirs on to it."""
    path = config.getoption("--record")
    if path is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(ResultFile(path))


class ResultFile:
    """Writes results.

    Args:
        path: of the file, which is written anew.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.write_text("", encoding="utf-8")

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Note how a test ended; its set-up and its end are noted only if they did not pass."""
        if report.when == "call" or report.outcome != "passed":
            record = dict(self._fields(report))
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")

    def _fields(self, report: Any) -> Iterator[tuple[str, object]]:
        yield "test", report.nodeid
        yield "outcome", report.outcome
        yield "seconds", round(report.duration, 3)
        yield from report.user_properties  # such as distances
        if report.outcome == "skipped" and isinstance(report.longrepr, tuple):
            yield "said", report.longrepr[2]
        elif report.outcome != "passed":
            yield "said", report.longreprtext
