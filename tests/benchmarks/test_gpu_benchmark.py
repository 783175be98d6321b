"""benchmarks/gpu.py runs through, here tiny and on the CPU, and says so where there is no GPU."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import fx

from acceptance.steps_machine import BENCHMARKED
from canzona_compile.ir.options import LARGEST_CAPACITY
from canzona_compile.tools.tune import parsed, planned, problems

ROOT = Path(__file__).parents[2]


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A process that is not told where this package is, as on a machine where it is not installed."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "TRITON_INTERPRET")}
    return subprocess.run(
        [sys.executable, *arguments],
        env=kept | {"OMP_NUM_THREADS": "1"} | environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def call(*arguments: str) -> subprocess.CompletedProcess[str]:
    return python(str(ROOT / "benchmarks" / "gpu.py"), *arguments)


@pytest.mark.full
def test_every_line_of_it_runs(tmp_path: Path) -> None:
    done = call("--dry", "--output", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.glob("gpu-dry-*.json")
    found = json.loads(path.read_text())
    assert found["problems"] == []
    assert len(found["products"]) == 5
    for record in (*found["products"], *found["steps"]):
        assert {"compiled", "exact", "fast"} < set(record["variants"])
        assert record["variants"]["compiled"]["ratio"] == 1
        assert set(record["ceilings"]) == {"bf16", "fp16", "bandwidth"}
    assert {record["kernel"] for record in found["kernels"]} == {"sym_gemm", "gemm_axpby"}
    assert all(set(record["ran"]) == {f"{record['kernel']}: library"} for record in found["kernels"])
    for record in found["steps"]:
        assert set(record["elementwise by floor"]) == {"exact", "fast"}
        for part in ("exact", "fast"):
            breakdown = record["breakdown"][part]
            assert {"prepare", "compute", "apply", "exposed", "step"} <= set(breakdown)
            assert min(breakdown[kind] for kind in ("prepare", "compute", "apply")) > 0
            assert (tmp_path / record["launches"][part]["trace"]).stat().st_size > 0
            assert all(count > 0 for count, _ in record["launches"][part]["by kernel"].values())
    assert json.loads((tmp_path / found["calibration"]).read_text())["products"]


@pytest.mark.full
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    done = call("--output", str(tmp_path))
    assert done.returncode == 2
    assert "CUDA" in done.stderr
    assert "--dry" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_kernels_that_copy_are_not_taken_for_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    kind_of, graph = importlib.import_module("gpu_steps").kind_of, fx.Graph()
    names = "g0_prepare muon0_prepare g0_unpack muon0_compute_stacked g0_pack g0_forward g1_apply"
    found = [kind_of(graph.call_module(name)) for name in names.split()]
    assert found == ["prepare", "prepare", "copy", "compute", "copy", "copy", "apply"]


def test_the_stacks_of_its_steps_are_tuned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Those of a plan with the capacity that an H200 has."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    everything = importlib.import_module("gpu_clock").Extent(False)
    tuned, params, plan = set(problems([parsed(text) for text in BENCHMARKED])), tmp_path / "params", tmp_path / "plan"
    fixed = (
        "--mesh",
        "dp=1",
        "--hardware",
        "h200",
        "--capacity",
        str(LARGEST_CAPACITY),
        "--no-alternatives",
        "--quiet",
    )
    for name, shapes in importlib.import_module("gpu_steps").sets(everything).items():
        params.write_text(json.dumps({f"layers.{i // 7}.{i % 7}": shape for i, shape in enumerate(shapes)}))
        options = ("--params", str(params), "--format", "json", "--output", str(plan))
        done = python("-m", "canzona_compile", "plan", *options, *fixed)
        assert done.returncode == 0, done.stderr
        assert set(problems(planned(plan))) <= tuned, name


def test_a_machines_own_python_runs_gpu_tests_and_installs_nothing() -> None:
    said = subprocess.run(
        ["make", "-n", "test-gpu", "bench-gpu", "VENV=", "PYTHON=the-python"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "pip" not in said
    assert "the-python -m pytest -m gpu" in said
    assert "the-python benchmarks/gpu.py" in said
