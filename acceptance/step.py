"""One step of an acceptance run, what it needs, and what came of it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal

import torch

from canzona_compile.errors import CanzonaError
from canzona_compile.report.units import plural
from canzona_compile.tools.processes import backend_for
from canzona_compile.tools.verification.layouts import LAYOUTS

SANITIZER = "compute-sanitizer"
StepNeed = Literal[
    "cuda", "triton", "nccl", "ranks", "two mesh dims", "two stages", "power of two", "pytest", "sanitizer"
]
StepStatus = Literal["running", "passed", "failed", "skipped"]


class WrongResult(CanzonaError):
    """A step ran to its end, and what it computed is wrong."""


@dataclass(frozen=True, slots=True)
class AcceptanceRank:
    """This process among those that take a step, and its device."""

    rank: int
    world: int
    device: torch.device

    @property
    def tiny(self) -> bool:
        """Whether matrices are to be as small as they can be."""
        return self.device.type == "cpu"


@dataclass(frozen=True, slots=True)
class OnRanks:
    """A function that every rank calls, each in a process of its own.

    Attributes:
        function: takes an `AcceptanceRank` and `args`, and returns what it found, in words. It raises if that is wrong.
            A module defines it at its top level.
        args: its other arguments; `{output}` in a text stands for the folder of results.
        variables: environment variables of processes that are started for it.
        ends_ranks: whether ranks that die have done what they should; only a rank that hangs or finds something wrong
            fails then. No later step uses these processes.
    """

    function: Callable[..., str]
    args: tuple[Any, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()
    ends_ranks: bool = False


@dataclass(frozen=True, slots=True)
class OneProgram:
    """A program that runs once, with the GPUs to itself.

    Attributes:
        arguments: the command; `{python}`, `{output}` and `{minutes}` stand for the interpreter, the folder of results
            and the time that is left.
    """

    arguments: tuple[str, ...]
    dry: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class AcceptanceStep:
    """One thing that is tried.

    Attributes:
        failing: what it means if it fails, and what to do about it.
        needs: what has to be there; without it the step is skipped.
        limit: seconds that the work may take. What takes longer counts as a hang.
    """

    name: str
    shows: str
    failing: str
    work: OnRanks | OneProgram
    needs: tuple[StepNeed, ...] = ()
    limit: float = 180.0


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came of a step.

    Attributes:
        said: what it found, or why it was skipped or failed.
        details: for failures: traceback, stack and last output, by rank.
        wrong: whether it failed because what it computed is wrong.
        seconds: how long it took, with the start of processes.
    """

    name: str
    shows: str
    failing: str
    ranks: int
    status: StepStatus
    said: str = ""
    details: tuple[tuple[str, str], ...] = ()
    wrong: bool = False
    seconds: float = 0.0

    @property
    def by(self) -> str:
        """Who took it, in words."""
        return plural(self.ranks, "rank") if self.ranks else "a program"

    @classmethod
    def of(cls, step: AcceptanceStep, ranks: int, status: StepStatus, said: str = "") -> StepResult:
        """The result of a step of which no more is known."""
        count = 0 if isinstance(step.work, OneProgram) else ranks
        return cls(step.name, step.shows, step.failing, count, status, said)


# -- needs -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AcceptedMachine:
    """Where steps are taken: the kind of device, and how many processes take those that run on ranks."""

    device: str
    ranks: int

    @property
    def backend(self) -> str:
        """What the ranks talk through, "nccl" or "gloo"."""
        return backend_for(self.device, self.ranks)

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
}
RANKS = {"ranks", "two mesh dims", "two stages"}  # needs of steps that show something else with more ranks


def needed(step: AcceptanceStep) -> str:
    """What a step needs, in words."""
    return ", ".join(NEEDS[need][1].split(",")[0].removeprefix("needs ") for need in step.needs) or "nothing special"


def needs_of(layout: str) -> tuple[StepNeed, ...]:
    """What has to be there for a layout of `LAYOUTS`."""
    how = LAYOUTS[layout]
    needs: tuple[StepNeed, ...] = ("ranks", "two mesh dims", "two stages")
    return (needs[len(how.outer)],) if how.turns or how.replicated else ()
