"""Where the first step of a wrapped optimizer spends its time."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar
from unittest.mock import patch

from canzona_compile import session as session_module

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class FirstStep:
    """Seconds of a first step.

    Attributes:
        capture: tracing every kind of parameter once.
        passes: all passes but emit, with the verifier after each.
        emit: writing the programs of this rank.
        rest: comparing plans with the other ranks, memory, and running the step itself.
        by_pass: of `passes` and `emit`, what each pass took that leads to the steady program,
            without verification.
        templates: distinct graphs captured.
    """

    total: float
    capture: float
    passes: float
    emit: float
    rest: float
    by_pass: Mapping[str, float]
    templates: int


class Stopwatch:
    """Adds up the time inside functions, by label."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def timed(self, label: str, function: Callable[P, R]) -> Callable[P, R]:
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            begin = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[label] += time.perf_counter() - begin

        return call


def run_first_step(optimizer: Any) -> FirstStep:
    """Take the first step of a wrapped optimizer and tell how long each stage was."""
    watch = Stopwatch()
    capture = optimizer.canzona.session.capture
    places = [
        (capture, "kind_of", "capture"),
        (session_module, "make_plan", "passes"),
        (session_module, "lower", "passes"),
        (session_module, "emit", "emit"),
    ]
    patches = [patch.object(owner, name, watch.timed(label, getattr(owner, name))) for owner, name, label in places]
    for active in patches:
        active.start()
    try:
        watch.timed("total", optimizer.step)()
    finally:
        for active in patches:
            active.stop()
    seconds = watch.seconds
    known = seconds["capture"] + seconds["passes"] + seconds["emit"]
    return FirstStep(
        total=seconds["total"],
        capture=seconds["capture"],
        passes=seconds["passes"],
        emit=seconds["emit"],
        rest=seconds["total"] - known,
        by_pass={record.name: record.seconds for record in optimizer.canzona.passes().records},
        templates=len(capture.kinds),
    )
