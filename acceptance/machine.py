"""What a reader of the results has to know of the machine: versions, GPUs and settings."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Collection
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import torch

from acceptance.step import AcceptedMachine
from canzona_compile.machine.hardware import this_processor

ROOT = Path(__file__).parents[1]  # of the repository
# What a bare machine may lack: for tests, for tests side by side, pages in a terminal, a comparison.
OPTIONAL = ("pytest", "xdist", "hypothesis", "rich", "dion")
# What changes how CUDA, NCCL, torch or Triton work. Nothing else of the environment is written down: it may be secret.
SETTINGS = ("CUDA_", "NCCL_", "TORCH_NCCL_", "PYTORCH_", "TORCHINDUCTOR_", "TRITON_", "OMP_NUM_THREADS", "CUBLAS")


def facts_of_ranks(machines: Collection[AcceptedMachine]) -> dict[str, str]:
    """All of it by name, for the numbers of ranks that take steps."""
    (device,) = {machine.device for machine in machines}
    ranks = ", ".join(f"{machine.ranks} over {machine.backend}" for machine in machines)
    return {"ranks": ranks, **facts(device)}


def facts(device: str) -> dict[str, str]:
    """All of it by name, for "cpu" or "cuda"."""
    head, changed = (
        said("git", "-C", str(ROOT), *words) for words in (("rev-parse", "HEAD"), ("status", "-s", "-uno"))
    )
    found = {
        "canzona_compile": installed("canzona-compile"),
        "commit": f"{head}, changed" if changed else head,
        "device": device,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": f"{this_processor()}, {os.cpu_count()} cores",
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "triton": installed("triton"),
        "not installed": ", ".join(name for name in OPTIONAL if find_spec(name) is None),
    }
    if device == "cuda":
        gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        found["GPUs"] = ", ".join(f"{i}: {g.name}, {g.total_memory / 2**30:.0f} GiB" for i, g in enumerate(gpus))
        found["CUDA"] = torch.version.cuda or ""
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
        query = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        found["driver"] = (said(*query).splitlines() or ["unknown: there is no nvidia-smi"])[0]
    found["settings"] = ", ".join(f"{k}={v}" for k, v in sorted(os.environ.items()) if k.startswith(SETTINGS))
    return found


def installed(package: str) -> str:
    """The version of a package, or that it is not there."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def said(*command: str) -> str:
    """What a program prints; nothing if there is no such program, or if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
