"""One step of an acceptance run, and what came of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from canzona_compile.errors import CanzonaError
from canzona_compile.report.units import plural
from canzona_compile.tools.verification.layouts import LAYOUTS

StepNeed = Literal[
    "cuda",
    "triton",
    "nccl",
    "ranks",
    "two mesh dims",
    "two stages",
    "power of two",
    "pytest",
    "sanitizer",
    "repository",
]
StepStatus = Literal["running", "passed", "failed", "skipped"]


class WrongResult(CanzonaError):
    """A step ran to its end, and what it computed is wrong."""


@dataclass(frozen=True, slots=True)
class AcceptanceRank:
    """Where a step runs.

    Attributes:
        rank, world: this process among those that run the step.
        device: its own.
    """

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
    """A program that runs once, on the first machine, with its GPUs to itself.

    Attributes:
        arguments: the command; `{python}`, `{output}` and `{minutes}` stand for the interpreter, the folder of results
            and the time that is left.
        dry: what is added to it in a dry run.
    """

    arguments: tuple[str, ...]
    dry: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class AcceptanceStep:
    """One thing that is tried.

    Attributes:
        name: as in "layouts/muon/fsdp/float32".
        shows: what is known once it has passed.
        failing: what it means if it fails, and what to do about it.
        work: what runs.
        needs: what has to be there; without it the step is skipped.
        limit: seconds that the work may take. What takes longer counts as a hang.
    """

    name: str
    shows: str
    failing: str
    work: OnRanks | OneProgram
    needs: tuple[StepNeed, ...] = ()
    limit: float = 180.0


def needs_of(layout: str) -> tuple[StepNeed, ...]:
    """What has to be there for a layout of `LAYOUTS`. A mesh dim of size 1 would show nothing."""
    how = LAYOUTS[layout]
    needs: tuple[StepNeed, ...] = ("ranks", "two mesh dims", "two stages")
    return (needs[len(how.outer)],) if how.turns or how.replicated else ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came of a step.

    Attributes:
        name, shows, failing: those of the step.
        ranks: how many ranks took it; 0 if it is a program.
        status: "running" until it has ended.
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
