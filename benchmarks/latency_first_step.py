"""Where the first step of a wrapped optimizer spends its time."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar
from unittest.mock import patch

from canzona_compile.capture.templates import Capture
from canzona_compile.ir.pipeline import Pass, run
from canzona_compile.ir.step import Step
from canzona_compile.passes import Emit

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class FirstStep:
    """Seconds of a first step, of wall time where nothing else is said.

    Attributes:
        cpu: CPU time of the whole process; on fewer cores than ranks, and beside other jobs, it says
            more than wall time.
        capture: tracing every kind of parameter once.
        passes: all passes but emit, with the verifier after each.
        emit: writing the two programs of this rank, for the first step and for all later ones.
        rest: comparing plans with the other ranks, memory, and running the step itself.
        by_pass: of `passes` and `emit`, what each pass took that leads to the steady program,
            without verification.
        captures: graphs that Dynamo was asked for.
    """

    total: float
    cpu: float
    capture: float
    passes: float
    emit: float
    rest: float
    by_pass: Mapping[str, float]
    captures: int


class Stopwatch:
    """Adds up the time inside functions, by label."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def timed(self, function: Callable[P, R], label: Callable[P, str]) -> Callable[P, R]:
        """The same function, on the clock; `label` names a call by its arguments."""

        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            begin = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[label(*args, **kwargs)] += time.perf_counter() - begin

        return call


def run_first_step(optimizer: Any) -> FirstStep:
    """Take the first step of a wrapped optimizer and tell how long each stage was."""
    watch = Stopwatch()
    capture = watch.timed(Capture.kind_of, lambda *_: "capture")
    passes = watch.timed(run, stage_of)
    with patch.object(Capture, "kind_of", capture), patch("canzona_compile.session.plan.run", passes):
        cpu = time.process_time()
        watch.timed(optimizer.step, lambda: "total")()
        cpu = time.process_time() - cpu
    seconds = watch.seconds
    known = seconds["capture"] + seconds["passes"] + seconds["emit"]
    return FirstStep(
        total=seconds["total"],
        cpu=cpu,
        capture=seconds["capture"],
        passes=seconds["passes"],
        emit=seconds["emit"],
        rest=seconds["total"] - known,
        by_pass={record.name: record.seconds for record in optimizer.canzona.passes().records},
        captures=optimizer.canzona.report().captures,
    )


def stage_of(_step: Step, passes: Sequence[Pass], *_others: Any) -> str:
    return "emit" if any(isinstance(one, Emit) for one in passes) else "passes"
