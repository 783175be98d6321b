"""Processes end cleanly under ZeRO-1, whatever is under way."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.harness.marks import also


@pytest.mark.parametrize("ending", ["destroy", *also(["keep"])])
def test_a_gather_that_nobody_waits_for(ending: str) -> None:
    """A thread of gloo that lets go of it last would abort the process."""
    found = subprocess.run(
        [sys.executable, "-m", "tests.data_parallel.exit_early", ending], capture_output=True, text=True, check=False
    )
    assert (found.returncode, found.stderr) == (0, "")
