"""Takes the steps in order, by ranks that it starts, watches, ends and replaces after every failure.

A supervisor is no rank: it touches no device and no collective, so nothing that a step does can hang or break it.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from acceptance.journal import AcceptanceJournal
from acceptance.machine import ROOT
from acceptance.step import (
    AcceptanceRank,
    AcceptanceStep,
    AcceptedMachine,
    OneProgram,
    OnRanks,
    StepResult,
    WrongResult,
)
from canzona_compile.tools.processes import CallEnd, RankPlace, Worker, collect, join_ranks, places_here, stacks, tail

log = logging.getLogger("acceptance")

# Seconds of the process groups' timeouts. One step waits for it, and no rank waits so long for a slow one.
PATIENCE = {("cuda", "nccl"): 120.0, ("cuda", "gloo"): 60.0, ("cpu", "gloo"): 30.0}
STARTING = 300.0  # seconds until a process has joined the others: imports, contexts, NCCL
GRACE = 10.0  # seconds that the others have once a rank has failed: it need not be the cause
LAST_WORDS = 20.0  # seconds in which a program that took too long says what it knows
ENDING = 30.0  # seconds that a program keeps for its end
PACKING = 10.0 + LAST_WORDS  # seconds that a run keeps for its own end
IN_HASTE = 90.0  # seconds for a step on ranks if the run has a limit: a hang leaves time for the others
SHORTEST = 20.0  # seconds: a step that has less is not begun
OUT_OF_TIME = "no time was left"
STATUS = {"returned": "passed", "raised": "failed", "died": "died", "hung": "hung"}
FAILURES = ("wrong", "failed", "died", "hung")  # a rank that hangs mostly waits for one that failed


class RankEnd(NamedTuple):
    """How a rank, or a program, ended a step."""

    rank: int
    status: str
    said: str
    details: str = ""


class Supervisor:
    """Takes steps with some ranks of this machine.

    Args:
        deadline: of the clock `time.monotonic`: what is not done by then is ended; None if there is none.
    """

    def __init__(
        self,
        machines: Mapping[int, AcceptedMachine],
        journal: AcceptanceJournal,
        folder: Path,
        deadline: float | None = None,
    ) -> None:
        self.machines, self.journal, self.folder, self.deadline = machines, journal, folder, deadline
        self._workers: dict[Worker, RankPlace] = {}
        self._running: tuple[Any, ...] = ()  # how many ranks, and with which variables
        self._store: Any = None  # where they have met; it lives as long as they do
        self._starts = 0

    def take(self, step: AcceptanceStep, ranks: int) -> None:
        """Take a step by so many ranks, unless something is missing."""
        machine, work, begin = self.machines[ranks], step.work, time.monotonic()
        limit = step.limit
        if self.deadline is not None and isinstance(work, OnRanks) and not work.ends_ranks:
            limit = min(limit, IN_HASTE)
        left = math.inf if self.deadline is None else self.deadline - begin - PACKING
        cut, limit = left < limit, min(limit, left)
        if reason := machine.missing(step) or (OUT_OF_TIME if left < SHORTEST else ""):
            self._note(StepResult.of(step, ranks, "skipped", reason))
            return
        self._note(StepResult.of(step, ranks, "running"))
        if isinstance(work, OneProgram):
            self.close()
            ends = [self._ran(machine, step, work, limit)]
        else:
            ends = self._on_ranks(machine, work, limit)
            if work.ends_ranks or any(end.status != "passed" for end in ends):
                self.close()
        result = judged(step, ends, ranks)
        if cut and all(end.status in ("passed", "hung") for end in ends) and result.status == "failed":
            result = replace(result, status="skipped", said=f"{OUT_OF_TIME}: ended after {limit:.0f} s")
        self._note(replace(result, seconds=round(time.monotonic() - begin, 1)))

    def close(self) -> None:
        """End the ranks; the next step starts others."""
        for worker in self._workers:
            worker.close()
        self._workers = {}

    def _note(self, result: StepResult) -> None:
        self.journal.add(result)
        if result.status != "running":
            said = (result.said.splitlines() or [""])[0]
            log.info("%-8s %s, %s: %s", result.status, result.name, result.by, said)

    def _on_ranks(self, machine: AcceptedMachine, work: OnRanks, limit: float) -> list[RankEnd]:
        """Have all ranks do some work; how it ended on each of them."""
        ends: list[CallEnd] = []
        if self._running != (machine.ranks, work.variables):
            self.close()
        begin = time.monotonic()
        if not self._workers:
            self._start(machine, work.variables)
            starting = min(STARTING, limit) if self.deadline else STARTING
            met = collect(self._workers, "join the process group", starting, GRACE)
            ends = [
                replace(e, said=f"could not join the process group: {e.said}") if e.how == "raised" else e for e in met
            ]
        if all(end.how == "returned" for end in ends):
            args = [arg.format(output=self.folder) if isinstance(arg, str) else arg for arg in work.args]
            left = max(1.0, limit - (time.monotonic() - begin)) if self.deadline else limit
            for worker, place in self._workers.items():
                worker.begin(take_part, (place, work.function, *args), left)
            ends = collect(self._workers, "end", left, None if work.ends_ranks else GRACE)
        late = [end.process for end in ends if end.how == "hung"]
        where = dict(zip(late, stacks(late) if late else (), strict=True))
        found = []
        for end in ends:
            said = str(end.value) if end.how == "returned" else end.said
            status = "wrong" if isinstance(end.value, WrongResult) else STATUS[end.how]
            found.append(RankEnd(self._workers[end.process].rank, status, said, where.get(end.process, end.details)))
        return sorted(found)

    def _start(self, machine: AcceptedMachine, variables: tuple[tuple[str, str], ...]) -> None:
        self._running = machine.ranks, variables
        self._starts += 1
        patience = PATIENCE[machine.device, machine.backend]
        places, self._store = places_here(machine.ranks, machine.device, patience)
        for place in places:
            worker = Worker(f"rank {place.rank}", self.folder / f"rank{place.rank}-{self._starts}.log")
            self._workers[worker] = place
            worker.begin(join, (place, variables), STARTING)

    def _ran(self, machine: AcceptedMachine, step: AcceptanceStep, work: OneProgram, limit: float) -> RankEnd:
        output = self.folder / f"{step.name.replace('/', '-')}.log"
        # A program that watches the time itself has a little less, so that it can end well.
        minutes = f"{max(limit - ENDING, 1.0) / 60:.2f}"
        texts = {"python": sys.executable, "output": str(self.folder), "minutes": minutes}
        dry = work.dry if machine.device == "cpu" else ()
        arguments = [argument.format(**texts) for argument in (*work.arguments, *dry)]
        paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
        with output.open("w", encoding="utf-8") as file, interrupts_reach_programs():
            process = subprocess.Popen(
                arguments,
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": paths},
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = process.wait(limit)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGINT)  # to the program alone, which says what it knows so far
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(LAST_WORDS)
                return RankEnd(0, "hung", f"did not end within {limit:g} seconds", tail(output))
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # with what it has started
                process.wait()
        said = next((line.strip() for line in reversed(tail(output).splitlines()) if line.strip()), "it said nothing")
        if code:
            return RankEnd(0, "failed", f"exit code {code}: {said}", tail(output))
        return RankEnd(0, "passed", said)


@contextlib.contextmanager
def interrupts_reach_programs() -> Iterator[None]:
    """Let the programs that start inside of this context hear Ctrl-C, if this one ignores it.

    A shell lets what it starts in the background ignore it, and programs inherit that, but no handler.
    """
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    if ignored:
        signal.signal(signal.SIGINT, lambda number, frame: None)
    try:
        yield
    finally:
        if ignored:
            signal.signal(signal.SIGINT, signal.SIG_IGN)


def judged(step: AcceptanceStep, ends: list[RankEnd], count: int) -> StepResult:
    """The result of a step that `count` ranks took, from how it ended on each of them."""
    ranks = isinstance(step.work, OnRanks)
    dying = isinstance(step.work, OnRanks) and step.work.ends_ranks
    failed = [end for end in ends if end.status in FAILURES and not (dying and end.status == "died")]
    failed.sort(key=lambda end: FAILURES.index(end.status))
    if not failed:
        said = list(dict.fromkeys(end.said for end in ends if end.said))
        return StepResult.of(step, count, "passed", " / ".join(said))
    lines = [f"{f'rank {end.rank} ' if ranks else ''}{end.status}: {end.said}" for end in failed]
    details = tuple((f"rank {end.rank}, {end.status}", end.details) for end in failed if end.details)
    found = StepResult.of(step, count, "failed", "\n".join(lines))
    return replace(found, details=details, wrong=failed[0].status == "wrong")


# -- in the process of a rank ----------------------------------------------------------------------


def join(place: RankPlace, variables: tuple[tuple[str, str], ...]) -> str:
    """Make this process a rank, in an environment with some variables; nothing to say about it."""
    # The package under test and torch read these, the local rank as the index of a device.
    own = {"RANK": place.rank, "WORLD_SIZE": place.world, "LOCAL_RANK": place.device_index}
    own["LOCAL_WORLD_SIZE"] = place.world
    os.environ.update({name: str(value) for name, value in own.items()} | dict(variables))
    join_ranks(place)
    return ""


def take_part(place: RankPlace, function: Any, *args: Any) -> str:
    """Do some work as one of the ranks; what it found."""
    cuda = place.device == "cuda"
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    said: str = function(AcceptanceRank(place.rank, place.world, device), *args)
    if cuda:
        torch.cuda.synchronize(device)  # errors of kernels show here at the latest
    gc.collect()  # optimizers hold one another, and recordings their memory
    if cuda:
        torch.cuda.empty_cache()
    return said
