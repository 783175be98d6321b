"""A result says what was run, where, and what came of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.scripts import ROOT

RESULTS = ROOT / "benchmarks" / "results"
KEPT = sorted(path.parent.name for path in RESULTS.glob("*/about.txt"))
NAMES = {"command", "began", "seconds", "exit code", "commit", "processor", "system", "python", "torch", "triton"}


def about(folder: Path) -> dict[str, str]:
    lines = (folder / "about.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split(": ", 1) for line in lines)


@pytest.mark.parametrize("name", KEPT)
def test_a_result_is_complete(name: str) -> None:
    assert about(RESULTS / name).keys() >= NAMES
    assert (RESULTS / name / "output.txt").stat().st_size
    assert f"`{name}`" in (RESULTS / "README.md").read_text(encoding="utf-8")


def test_what_a_command_prints_is_kept(tmp_path: Path) -> None:
    line = [
        sys.executable,
        str(ROOT / "benchmarks" / "keep.py"),
        str(tmp_path / "own"),
        "python",
        "-c",
        "print(7); 1/0",
    ]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert done.stdout.startswith("7\n")
    kept = about(tmp_path / "own")
    assert kept.keys() >= NAMES
    assert kept["exit code"] == "1"
    assert kept["command"] == "python -c 'print(7); 1/0'"
    output = (tmp_path / "own" / "output.txt").read_text(encoding="utf-8")
    assert output == done.stdout
    assert "ZeroDivisionError" in output
