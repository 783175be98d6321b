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

from tests.harness.marks import full

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
    assert json.loads((tmp_path / found["calibration"]).read_text())["products"]


@pytest.mark.full
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    done = call("--output", str(tmp_path))
    assert done.returncode == 2
    assert "CUDA" in done.stderr
    assert "--dry" in done.stderr
    assert list(tmp_path.iterdir()) == []


BROKEN = """if True:
    import sys
    sys.path.insert(0, "benchmarks")
    import gpu, gpu_products

    def broken(*_, **__):
        raise RuntimeError("no such instruction")

    gpu_products.gemm_axpby = broken
    sys.exit(gpu.main(["--dry", "--only", "kernels", "--output", sys.argv[1]]))
    """


@pytest.mark.full
def test_what_fails_costs_no_other_figure(tmp_path: Path) -> None:
    done = python("-c", BROKEN, str(tmp_path))
    assert done.returncode == 1, done.stdout + done.stderr
    (path,) = tmp_path.glob("gpu-dry-*.json")
    found = json.loads(path.read_text())
    assert {record["kernel"] for record in found["kernels"]} == {"sym_gemm"}
    assert len(found["problems"]) == len(found["kernels"])
    assert all("no such instruction" in problem for problem in found["problems"])


def test_kernels_that_copy_are_not_taken_for_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    kind_of, graph = importlib.import_module("gpu_steps").kind_of, fx.Graph()
    names = "g0_prepare muon0_prepare g0_unpack muon0_compute_stacked g0_pack g0_forward g1_apply"
    found = [kind_of(graph.call_module(name)) for name in names.split()]
    assert found == ["prepare", "prepare", "copy", "compute", "copy", "copy", "apply"]


PLUGIN = """if True:
    import os, sys
    import pytest

    class Seen:
        def pytest_collection_finish(self):
            print("interpret:", os.environ.get("TRITON_INTERPRET"), "imported:", "triton" in sys.modules)

    sys.exit(pytest.main([*sys.argv[1:], "--collect-only", "-q", "tests/harness/untimed.py"], plugins=[Seen()]))
    """


@pytest.mark.full
@pytest.mark.parametrize(("options", "expected"), [full(["-m", "gpu"], "None"), ([], "1")], ids=["gpu", "cpu"])
def test_kernels_are_compiled_for_tests_on_a_gpu_and_interpreted_for_others(options: list[str], expected: str) -> None:
    done = python("-c", PLUGIN, *options)
    assert f"interpret: {expected} imported: False" in done.stdout, done.stdout + done.stderr


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
