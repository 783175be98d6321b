"""What an acceptance run finds on a machine: versions, GPUs, settings, and which steps it can take."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import torch

import canzona_compile.errors as errors
from canzona_compile.tools.acceptance.step import AcceptanceStep, StepNeed
from canzona_compile.tools.processor import this_processor

ROOT = Path(errors.__file__).parents[1]  # of the repository, if this is a checkout
SANITIZER = "compute-sanitizer"
# What changes how CUDA, NCCL, torch or Triton work. Nothing else of the environment is written down: it may be secret.
SETTINGS = ("CUDA_", "NCCL_", "TORCH_NCCL_", "PYTORCH_", "TORCHINDUCTOR_", "TRITON_", "OMP_NUM_THREADS", "CUBLAS")


@dataclass(frozen=True, slots=True)
class AcceptedMachine:
    """Where a run takes place.

    Attributes:
        device: "cuda" or "cpu".
        ranks: how many processes take the steps that run on ranks.
        root: the folder with tests and benchmarks; None if only the package is installed.
    """

    device: str
    ranks: int
    root: Path | None

    def missing(self, step: AcceptanceStep) -> str:
        """Why a step cannot be taken here; empty if it can be."""
        return "; ".join(reason for need in step.needs if (reason := MISSING[need](self)))


def no_ranks(machine: AcceptedMachine) -> str:
    """Why steps of several ranks cannot be taken."""
    if machine.ranks > 1:
        return ""
    if machine.device == "cuda":
        return f"needs several ranks, each with a GPU of its own, and there is {torch.cuda.device_count() or 'no'} GPU"
    return "needs several ranks, and this run has one"


def no_two_mesh_dims(machine: AcceptedMachine) -> str:
    """Why steps on a mesh of two dims cannot be taken; one of size 1 would show nothing."""
    enough = machine.ranks >= 4 and machine.ranks % 2 == 0
    return "" if enough else f"needs an even number of ranks from four on, and there are {machine.ranks}"


def no_two_stages(machine: AcceptedMachine) -> str:
    """Why steps of two groups of ranks on two mesh dims cannot be taken."""
    return "" if machine.ranks % 4 == 0 else f"needs ranks in fours, and there are {machine.ranks}"


def no_power_of_two(machine: AcceptedMachine) -> str:
    """Why means over ranks could round."""
    whole = machine.ranks & (machine.ranks - 1) == 0
    return "" if whole else f"needs a power of two of ranks, for exact means, and there are {machine.ranks}"


MISSING: Mapping[StepNeed, Callable[[AcceptedMachine], str]] = {
    "cuda": lambda machine: "" if machine.device == "cuda" else "needs a CUDA device, and this run is on the CPU",
    "ranks": no_ranks,
    "two mesh dims": lambda machine: no_ranks(machine) or no_two_mesh_dims(machine),
    "two stages": lambda machine: no_ranks(machine) or no_two_stages(machine),
    "power of two": no_power_of_two,
    "sanitizer": lambda _: "" if shutil.which(SANITIZER) else f"needs {SANITIZER} of the CUDA toolkit on the PATH",
    "repository": lambda m: (
        "needs a checkout of the repository with pytest installed"
        if m.root is None or find_spec("pytest") is None
        else ""
    ),
}


def checkout() -> Path | None:
    """The folder of the repository; None where the package lies by itself."""
    return ROOT if (ROOT / "tests").is_dir() and (ROOT / "benchmarks").is_dir() else None


def facts(machine: AcceptedMachine) -> dict[str, str]:
    """What a reader of the results has to know of the machine, by name."""
    found = {
        "canzona_compile": installed("canzona-compile"),
        "commit": commit_of(machine.root),
        "device": machine.device,
        "ranks": str(machine.ranks),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": this_processor(),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "triton": installed("triton"),
    }
    if machine.device == "cuda":
        count = torch.cuda.device_count()
        names = [torch.cuda.get_device_name(i) for i in range(count)]
        memory = [f"{torch.cuda.get_device_properties(i).total_memory / 2**30:.0f} GiB" for i in range(count)]
        found["GPUs"] = ", ".join(f"{i}: {n}, {m}" for i, (n, m) in enumerate(zip(names, memory, strict=True)))
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


def commit_of(root: Path | None) -> str:
    """The commit that is checked out, and whether files differ from it."""
    if root is None:
        return "unknown"
    head = said("git", "-C", str(root), "rev-parse", "HEAD")
    return f"{head}, changed" if head and said("git", "-C", str(root), "status", "--porcelain", "-uno") else head


def said(*command: str) -> str:
    """What a program prints; nothing if there is no such program, or if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
