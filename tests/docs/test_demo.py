"""The demo trains on every layout, and every parameter has the bits of the plain optimizers."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.docs.scripts import ROOT
from tests.harness.marks import full

WAYS = [
    ("fsdp", "muon", 2),
    ("zero1", "muon", 2),
    ("ddp", "muon", 2),
    ("hsdp", "muon", 2),
    ("tp", "muon", 4),
    ("zero1-tp", "muon", 4),
    ("fsdp", "adamw", 2),
    ("zero1", "adamw", 2),
]


@pytest.mark.ranks
@pytest.mark.parametrize(("parallel", "optimizer", "ranks"), [WAYS[0], *(full(*way) for way in WAYS[1:])])
def test_the_demo_verifies_the_parameters_of_both_optimizers(parallel: str, optimizer: str, ranks: int) -> None:
    options = f"--parallel {parallel} --optimizer {optimizer} --ranks {ranks} --batch 8 --steps 2 --verify 2"
    line = [sys.executable, str(ROOT / "examples" / "train_lm.py"), *options.split(), "--untied"]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    done = subprocess.run(line, env=variables, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("28 matrices and 19 others bitwise equal to plain") == 2
    assert ("Muon+AdamW on" if optimizer == "muon" else "AdamW+AdamW on") in done.stdout
    assert "parameters that each rank updates by itself" in done.stdout
