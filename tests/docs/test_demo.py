"""The demo trains on every layout, and every parameter has the bits of the plain optimizers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.scripts import ROOT
from tests.harness.demo import EXAMPLES, train_here
from tests.harness.marks import full
from tests.harness.ranks import run

WAYS = [("fsdp", "muon", 2), ("zero1", "muon", 2), ("ddp", "muon", 2), ("hsdp", "muon", 2), ("tp", "muon", 4)]
WAYS += [("zero1-tp", "muon", 4), ("fsdp-tp", "muon", 4), ("zero1-forward", "muon", 2), ("fsdp", "adamw", 2)]
WAYS += [("zero1", "adamw", 2), ("fsdp", "normuon", 2), ("fsdp", "soap", 2), ("fsdp", "kl-soap", 2)]
NAMES = {"muon": "Muon", "normuon": "NorMuon", "soap": "SOAP", "kl-soap": "KLSOAP", "adamw": "AdamW"}
OPTIONS = "--parallel {} --optimizer {} --ranks {} --batch 8 --steps 2 --verify 2 --untied"


def check(printed: str, optimizer: str) -> None:
    assert printed.count("28 matrices and 19 others bitwise equal to plain") == 2
    assert f"{NAMES[optimizer]}+AdamW on" in printed
    assert "parameters that each rank updates by itself" in printed


@pytest.mark.parametrize(("parallel", "optimizer", "ranks"), [WAYS[0], *(full(*way) for way in WAYS[1:])])
def test_the_demo_verifies_the_parameters_of_both_optimizers(
    parallel: str, optimizer: str, ranks: int, tmp_path: Path
) -> None:
    """On ranks that are there already: processes of its own would import torch, each by itself."""
    options = OPTIONS.format(parallel, optimizer, ranks)
    found = run(ranks, train_here, options, f"file://{tmp_path}/store", fresh=True, limit=300)
    assert all(good for good, _ in found)
    check(found[0][1], optimizer)


@pytest.mark.full
def test_the_demo_starts_its_ranks() -> None:
    line = [sys.executable, str(EXAMPLES / "train_lm.py"), *OPTIONS.format(*WAYS[0]).split()]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    done = subprocess.run(line, env=variables, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    check(done.stdout, "muon")
