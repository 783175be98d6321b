"""Keeps the tuner's verdicts on disk: one JSON file per kind of GPU, torch, triton and source of kernels."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from canzona_compile.kernels.dispatch import KernelChoice, Problem, Tile, candidates

log = logging.getLogger(__name__)

JsonObject = Mapping[str, object]


@cache
def source_digest() -> str:
    """Hash all files of this folder: a verdict no longer holds once a kernel or its wrapper has changed."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class GpuKind:
    """A kind of GPU; the fastest kernel differs even between cards of one architecture.

    Attributes:
        arch: ten times the compute capability's major number plus the minor one.
        processors: how many multiprocessors it has, or the part of it that is lent.
    """

    arch: int
    name: str
    processors: int


def versions(machine: GpuKind) -> dict[str, str]:
    """Return what a verdict depends on besides the problem; the file and its name contain it."""
    return {
        "arch": f"sm_{machine.arch}",
        "device": machine.name,
        "processors": str(machine.processors),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "quack": _version("quack-kernels"),
        "source": source_digest(),
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def folder() -> Path:
    """The user's cache folder: $XDG_CACHE_HOME/canzona_compile, or ~/.cache/canzona_compile."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "canzona_compile"


def path_of(machine: GpuKind) -> Path:
    """Return the file of the verdicts for a kind of GPU and the installed software."""
    key = hashlib.sha256(json.dumps(versions(machine), sort_keys=True).encode()).hexdigest()[:12]
    return folder() / f"kernels-sm_{machine.arch}-{key}.json"


def load(machine: GpuKind) -> dict[Problem, KernelChoice]:
    """Load all verdicts that hold here. There are none without a file; one that cannot be read is logged."""
    path = path_of(machine)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError:
        return {}
    try:
        document = json.loads(text)
        if document["versions"] != versions(machine):
            return {}
        found = dict(_parsed(entry) for entry in document["verdicts"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("%s: not verdicts of the tuner (%s: %s); ignored", path, type(error).__name__, error)
        return {}
    return {problem: choice for problem, choice in found.items() if _known(problem, choice, machine.arch)}


def store(machine: GpuKind, problem: Problem, choice: KernelChoice, figures: JsonObject) -> Path:
    """Add a verdict to the file, replace an older one of the same problem, and return the file."""
    path = path_of(machine)
    path.parent.mkdir(parents=True, exist_ok=True)
    mine = _written(problem, choice, figures)
    with _alone(path.parent):
        try:
            others = json.loads(path.read_text(encoding="utf-8"))["verdicts"]
        except (OSError, ValueError, KeyError, TypeError):
            others = []
        kept = [entry for entry in others if entry.get("problem") != mine["problem"]]
        text = json.dumps({"versions": versions(machine), "verdicts": [*kept, mine]}, indent=1)
        # A process that reads meanwhile sees the old file or the new one.
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".new")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text + "\n")
        os.replace(name, path)
    return path


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold a lock on the folder: two processes that add to a file at the same time would lose one of the verdicts."""
    import fcntl  # late: Unix has it, and so has every system with Triton

    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _written(problem: Problem, choice: KernelChoice, figures: JsonObject) -> dict[str, Any]:
    fields = dataclasses.asdict(problem)
    fields |= {name: str(fields[name]).removeprefix("torch.") for name in ("dtype", "out_dtype")}
    return {"problem": fields, "choice": dataclasses.asdict(choice), "figures": dict(figures)}


def _parsed(entry: dict[str, Any]) -> tuple[Problem, KernelChoice]:
    fields, chosen = dict(entry["problem"]), dict(entry["choice"])
    for name in ("dtype", "out_dtype"):
        fields[name] = getattr(torch, fields[name])
    tile = chosen.pop("tile")
    return Problem(**fields), KernelChoice(**chosen, tile=None if tile is None else Tile(**tile))


def _known(problem: Problem, choice: KernelChoice, arch: int) -> bool:
    """Tell whether a choice is possible here."""
    return choice.kernel == "library" or any(choice.same_kernel(other) for other in candidates(problem.op, arch))
