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
# What a bare machine may lack: for tests, for tests side by side, pages in a terminal, one planner, two comparisons.
OPTIONAL = ("pytest", "xdist", "hypothesis", "rich", "scipy", "quack", "dion")
# What changes how CUDA, NCCL, torch or Triton work. Nothing else of the environment is written down: it may be secret.
SETTINGS = ("CUDA_", "NCCL_", "TORCH_NCCL_", "PYTORCH_", "TORCHINDUCTOR_", "TRITON_", "OMP_NUM_THREADS", "CUBLAS")


@dataclass(frozen=True, slots=True)
class AcceptedMachine:
    """Where a run takes place.

    Attributes:
        device: "cuda" or "cpu".
        ranks: how many processes take the steps that run on ranks.
        root: the folder with tests and benchmarks; None if only the package is installed.
        backend: what the ranks talk through, "nccl" or "gloo".
    """

    device: str
    ranks: int
    root: Path | None
    backend: str = "gloo"

    def missing(self, step: AcceptanceStep) -> str:
        """Why a step cannot be taken here; empty if it can be."""
        unmet = [NEEDS[need][1] for need in step.needs if not NEEDS[need][0](self)]
        return "; ".join(unmet).format(ranks=self.ranks)


# For each need: what meets it, and what is said where it is not met. A mesh dim of size 1 would show nothing.
NEEDS: Mapping[StepNeed, tuple[Callable[[AcceptedMachine], bool], str]] = {
    "cuda": (lambda own: own.device == "cuda", "needs a CUDA device, and this run is on the CPU"),
    "triton": (lambda _: find_spec("triton") is not None, "needs Triton, which is not installed"),
    "nccl": (
        lambda own: own.backend == "nccl",
        "needs NCCL, which needs a GPU for each rank; these ranks talk through gloo",
    ),
    "ranks": (lambda own: own.ranks > 1, "needs several ranks, and there is one"),
    "two mesh dims": (
        lambda own: own.ranks >= 4 and own.ranks % 2 == 0,
        "needs an even number of ranks from four on, and there are {ranks}",
    ),
    "two stages": (lambda own: own.ranks % 4 == 0, "needs ranks in fours, and there are {ranks}"),
    "power of two": (
        lambda own: own.ranks & (own.ranks - 1) == 0,
        "needs a power of two of ranks, for exact means, and there are {ranks}",
    ),
    "sanitizer": (lambda _: shutil.which(SANITIZER) is not None, f"needs {SANITIZER} of the CUDA toolkit on the PATH"),
    "pytest": (
        lambda _: find_spec("pytest") is not None,
        "needs pytest, which is not installed: `pip install --target FOLDER pytest pytest-xdist` on another machine, "
        "and PYTHONPATH=FOLDER here",
    ),
    "repository": (lambda own: own.root is not None, "needs a checkout of the repository"),
}


def needed(step: AcceptanceStep) -> str:
    """What a step needs, in words."""
    return ", ".join(NEEDS[need][1].split(",")[0].removeprefix("needs ") for need in step.needs) or "nothing special"


def checkout() -> Path | None:
    """The folder of the repository; None where the package lies by itself."""
    return ROOT if (ROOT / "tests").is_dir() and (ROOT / "benchmarks").is_dir() else None


def facts(machine: AcceptedMachine, worlds: Mapping[int, str]) -> dict[str, str]:
    """What a reader of the results has to know of the machine, by name.

    Args:
        machine: the machine.
        worlds: the numbers of ranks that take steps, each with what these ranks talk through.
    """
    found = {
        "canzona_compile": installed("canzona-compile"),
        "commit": commit_of(machine.root),
        "device": machine.device,
        "ranks": ", ".join(f"{n} over {backend}" for n, backend in worlds.items()),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": this_processor(),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "triton": installed("triton"),
        "not installed": ", ".join(name for name in OPTIONAL if find_spec(name) is None),
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
