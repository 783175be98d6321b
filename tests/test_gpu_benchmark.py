"""benchmarks/gpu.py runs through, here tiny and on the CPU, and says so where there is no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]


def call(*arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)


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
    assert all(("missing" in record) != ("variants" in record) for record in found["kernels"])
    for record in found["steps"]:
        for part in ("exact", "fast"):
            breakdown = record["breakdown"][part]
            assert {"prepare", "compute", "apply", "exposed", "step"} <= set(breakdown)
            assert min(breakdown[kind] for kind in ("prepare", "compute", "apply")) > 0
            assert (tmp_path / record["launches"][part]["trace"]).stat().st_size > 0
    assert json.loads((tmp_path / found["calibration"]).read_text())["products"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    done = call("--output", str(tmp_path))
    assert done.returncode == 2
    assert "CUDA" in done.stderr
    assert "--dry" in done.stderr
    assert list(tmp_path.iterdir()) == []
