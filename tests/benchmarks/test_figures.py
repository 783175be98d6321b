"""Tables of benchmarks name the processor that they are of; figures of docs/reproduction.md are those we promise."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import canzona_compile
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


# -- reproduction ----------------------------------------------------------------------------------

PAPER = 0.0717  # seconds of an optimizer step, Qwen3-32B on 256 GPUs


def planned(**options: Any) -> canzona_compile.OfflinePlan:
    return canzona_compile.plan("qwen3-32b", mesh="dp=32,tp=8", updates="zero1", alternatives=False, **options)


def test_owners_by_the_alpha_rule_take_what_the_paper_says() -> None:
    found = planned(split="none", planner="alpha", strategy="owner").forecast
    assert found.simulation.seconds == pytest.approx(PAPER, rel=0.20)
    assert found.matrices == 256


@pytest.mark.full
def test_the_best_plan_takes_30_ms_and_is_balanced_otherwise() -> None:
    best = planned(numerics="fast").forecast
    assert best.simulation.seconds <= 0.030
    assert {t.strategy for t in best.tasks} == {"owner"}  # owners iterate on Gram matrices, which a run does as well
    whole = planned(strategy="owner").forecast
    assert whole.imbalance <= 1.10
    assert whole.simulation.seconds > best.simulation.seconds


def test_without_root_or_tools_there_are_no_slow_links(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert said(str(BENCHMARKS / "slow_links.py")).startswith("nothing was measured: links are made by ")
