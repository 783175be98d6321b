"""Runs of the demo, examples/train_lm.py, and the logs that they leave."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]


class DemoFailed(RuntimeError):
    """The demo did not take all steps: what it printed."""


@dataclass(frozen=True, slots=True)
class LossRow:
    """A step: its loss and a digest of the parameters that it is of, as texts with all digits; time of the update."""

    loss: str
    digest: str
    ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Losses:
    """A run: how it was made, where, and its steps."""

    command: str
    machine: str
    rows: tuple[LossRow, ...]


def read(path: Path) -> Losses:
    """Read a log of the demo; one without times, too."""
    command, machine, _, *lines = path.read_text(encoding="utf-8").splitlines()
    rows = [line.split() for line in lines]
    steps = tuple(LossRow(loss, digest, float(ms[0]) if ms else 0.0) for _, loss, digest, *ms in rows)
    return Losses(command.removeprefix("# "), machine.removeprefix("# "), steps)


def run_demo(folder: Path, arguments: str, steps: int, log: Path) -> Losses:
    """Train with the code of a folder.

    Args:
        arguments: of the demo.
        steps: how many it has to take. A loss that does not fall, for which the demo has an exit code, is no failure.
        log: where it writes its log.
    """
    log.unlink(missing_ok=True)
    # Logs say how they were made, and are kept: no folders of this machine.
    line = [sys.executable, "examples/train_lm.py", *arguments.split(), "--log", os.path.relpath(log, folder)]
    variables = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(line, cwd=folder, env=variables, capture_output=True, text=True, check=False)
    found = read(log) if log.exists() else None
    if found is None or len(found.rows) != steps:
        said = (done.stdout + done.stderr).strip()[-2000:]
        raise DemoFailed(f"{arguments} in {folder} failed with {done.returncode}: {said}")
    return found
