"""Tables of benchmarks name the processor that they are of, and so does the page that keeps some of their figures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from canzona_compile.machine.hardware import name_in, this_processor
from tests.harness.marks import also

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
EPYC = "processor\t: 0\ncpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC\nflags\t\t: fpu"


def said(*line: str) -> str:
    done = subprocess.run([sys.executable, *line], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_processor_has_a_name_and_numbers() -> None:
    assert name_in(EPYC) == "AMD EPYC, family 25 model 17"
    assert this_processor()


@pytest.mark.parametrize(
    "line",
    also(
        [
            "step_latency.py --ranks 1 --cases even --rounds 1",
            "stagger_profile.py --ranks 1 --matrices 1 --size 8 --every 2 --periods 1",
            "iteration.py --ranks 2 --layers 1 --rounds 1",
        ]
    ),
)
def test_a_table_names_the_processor(line: str, tmp_path: Path) -> None:
    script, *options = line.split()
    table = said(str(BENCHMARKS / script), *options, "--json", str(tmp_path / "found.json"))
    assert this_processor() in " ".join(table.split())
    assert json.loads((tmp_path / "found.json").read_text())
