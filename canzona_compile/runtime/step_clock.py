"""Times the parts of a step while it is measured: by the host's clock on CPU, by events on CUDA.

Every moment of a lane belongs to one act. A lane is what one stream does; on CPU there is one. On CUDA the host waits
for no event before `read`, which is called after the last step.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from canzona_compile.lowering.stream_sync import COMPUTE

OTHER = "other"  # what belongs to no named act


@dataclass(frozen=True, slots=True)
class ActSpan:
    """A part of a measured step on one lane of this rank.

    Attributes:
        act: an act of the schedule, "prepare" or "wait gather", or a part of the step around the program.
        group: the index of the micro-group; -1 outside of programs.
        lane: "compute" for the caller's stream and for the CPU; otherwise the name of the stream.
        start, end: in seconds, by `time.perf_counter` on CPU, and since the first of these spans on CUDA.
    """

    act: str
    group: int
    lane: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """What a clock saw of a step, and since the step before.

    Attributes:
        seconds: of the step, and of what belongs to it before and after.
        spans: in the order in which they began on each lane.
    """

    seconds: float
    spans: tuple[ActSpan, ...]

    def by_act(self) -> dict[str, float]:
        """The seconds in which any lane does an act."""
        found: dict[str, float] = {}
        until: dict[str, float] = {}
        for span in sorted(self.spans, key=lambda span: span.start):
            begin = max(span.start, until.get(span.act, span.start))
            found[span.act] = found.get(span.act, 0.0) + max(0.0, span.end - begin)
            until[span.act] = max(begin, span.end)
        return found

    @property
    def exposed(self) -> float:
        """Seconds in which the rank, or the stream that computes, waited for communication."""
        waits = (s for s in self.spans if s.lane == COMPUTE and (s.act.startswith("wait ") or s.act == "meet"))
        return sum((s.end - s.start for s in waits), 0.0)


@dataclass(frozen=True, slots=True)
class Turn:
    """A moment from which on a lane does something else: an act of a micro-group, or nothing (an empty act)."""

    act: str
    group: int
    lane: str
    at: Any  # seconds on CPU, an event on CUDA


@dataclass(frozen=True, slots=True)
class NotedStep:
    """What a clock has noted of a step.

    Attributes:
        outer: the begin and end of each part of the step that lies in no other one.
    """

    turns: tuple[Turn, ...]
    outer: tuple[tuple[Any, Any], ...]


class StepClock:
    """Notes when the acts of a step begin and end.

    Args:
        device: the device of the parameters.

    Attributes:
        stopped: whether `during` notes nothing any more, whoever still has this clock.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.stopped = device, False
        self._acts: list[str] = []  # that have begun and not ended, from the outside in
        self._turns: list[Turn] = []
        self._outer: list[tuple[Any, Any]] = []  # begin and end of what no other act holds

    @contextlib.contextmanager
    def during(self, act: str) -> Iterator[None]:
        """Inside this context the present lane does `act`, but for the acts that begin in it."""
        begin = self.turn(act)
        self._acts.append(act)
        try:
            yield
        finally:
            self._acts.pop()
            end = self.turn(self._acts[-1] if self._acts else "")
            if not self._acts:
                self._outer.append((begin, end))

    def turn(self, act: str, group: int = -1, lane: str = COMPUTE) -> Any:
        """Note that a lane does something else from now on, and return this moment."""
        at = self._now()
        self._turns.append(Turn(act, group, lane, at))
        return at

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def take(self) -> NotedStep:
        """Return what was noted since the last call. No act may be open. The host waits for nothing."""
        assert not self._acts
        noted = NotedStep(tuple(self._turns), tuple(self._outer))
        self._turns, self._outer = [], []
        return noted

    def read(self, steps: Sequence[NotedStep]) -> list[MeasuredStep]:
        """Turn moments into seconds. On CUDA the host waits for the device first."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return [self._measured(noted) for noted in steps]

    def _measured(self, noted: NotedStep) -> MeasuredStep:
        spans: list[ActSpan] = []
        last: dict[str, Turn] = {}

        def seconds(moment: Any) -> float:
            if self.device.type != "cuda":
                return float(moment)
            return float(noted.turns[0].at.elapsed_time(moment)) / 1e3

        for one in noted.turns:
            before = last.get(one.lane)
            if before is not None and before.act:
                spans.append(ActSpan(before.act, before.group, before.lane, seconds(before.at), seconds(one.at)))
            last[one.lane] = one
        return MeasuredStep(sum((seconds(end) - seconds(start) for start, end in noted.outer), 0.0), tuple(spans))


def during(clock: StepClock | None, act: str) -> AbstractContextManager[None]:
    """A context in which a clock notes an act; without one, or with one that stopped, it does nothing."""
    return NOTHING if clock is None or clock.stopped else clock.during(act)


NOTHING: AbstractContextManager[None] = contextlib.nullcontext()
