"""Takes the steps in order, by ranks that it starts, watches and ends; supervisors of several machines go in step.

A supervisor is no rank: it touches no device and no collective, so nothing that a step does can hang or break it. It
starts its ranks in processes of their own, replaces them after every failure, and tells the others through a store what
became of them, so that all of them decide alike.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch

from canzona_compile.compat.torch_private import Store
from canzona_compile.tools.acceptance.journal import AcceptanceJournal
from canzona_compile.tools.acceptance.machine import AcceptedMachine
from canzona_compile.tools.acceptance.step import (
    AcceptanceRank,
    AcceptanceStep,
    OneProgram,
    OnRanks,
    StepResult,
    WrongResult,
)
from canzona_compile.tools.processes import CallEnd, RankPlace, Worker, collect, join_ranks, stacks, tail

log = logging.getLogger(__name__)

STARTING = 300.0  # seconds until a process has joined the others: imports, contexts, NCCL
GRACE = 10.0  # seconds that the others have once a rank has failed: it need not be the cause
LAST_WORDS = 20.0  # seconds in which a program that took too long says what it knows
ENDING = 30.0  # seconds that a program keeps for its end
PACKING = 10.0 + LAST_WORDS  # seconds that a run keeps for its own end
IN_HASTE = 90.0  # seconds for a step on ranks if the run has a limit: a hang leaves time for the others
SHORTEST = 20.0  # seconds: a step that has less is not begun
OUT_OF_TIME = "no time was left"
MARGIN = 120.0  # seconds that supervisors wait for one another beyond all limits
LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "TORCH_NCCL_ASYNC")
NOT_JOINED = "could not join the process group"
STATUS = {"returned": "passed", "raised": "failed", "died": "died", "hung": "hung"}


@dataclass(frozen=True, slots=True)
class LocalRanks:
    """The ranks of a supervisor.

    Attributes:
        places: of its ranks, whose numbers follow one another.
        store: where the supervisors of all machines meet.
    """

    places: tuple[RankPlace, ...]
    store: Store

    def of(self, ranks: int) -> tuple[RankPlace, ...]:
        """The places where only so many ranks take part. Only a supervisor of all ranks can leave some out."""
        if ranks == self.places[0].world:
            return self.places
        return tuple(replace(place, world=ranks, near=ranks) for place in self.places[:ranks])

    @property
    def first(self) -> bool:
        """Whether this supervisor has the first rank, and so decides and writes."""
        return self.places[0].rank == 0


class RankEnd(NamedTuple):
    """How a rank ended a step.

    Attributes:
        rank: which one.
        status: "passed", "failed", "wrong" if what it computed is wrong, "hung" if it did not end in time, or "died" if
            its process ended.
        said: what it found, or what was wrong.
        details: a traceback, or the stacks of its threads.
    """

    rank: int
    status: str
    said: str
    details: str = ""


class Supervisor:
    """Takes steps with some ranks of this machine.

    Args:
        local_ranks: which of the ranks are this one's.
        machines: the machine, by the number of ranks that take a step.
        journal: takes the results; None on all but the first supervisor.
        folder: for logs and results of programs; it is there.
        deadline: of the clock `time.monotonic`: what is not done by then is ended; None if there is none.

    Attributes:
        failed: whether a step has failed; all supervisors agree about that.
    """

    def __init__(
        self,
        local_ranks: LocalRanks,
        machines: Mapping[int, AcceptedMachine],
        journal: AcceptanceJournal | None,
        folder: Path,
        deadline: float | None = None,
    ) -> None:
        self.own, self.machines, self.journal, self.folder = local_ranks, machines, journal, folder
        self.deadline = deadline
        self.failed = False
        self._workers: dict[Worker, RankPlace] = {}
        self._variables: tuple[tuple[str, str], ...] = ()
        self._ranks = 0
        self._meetings = 0

    def take(self, number: int, step: AcceptanceStep, ranks: int) -> None:
        """Take a step, unless something is missing; all supervisors call this with the same steps.

        Args:
            number: of the step in this run.
            step: what is tried.
            ranks: how many ranks take it.
        """
        machine = self.machines[ranks]
        reason, limit, cut = self._of_the_first(f"{number}/begin", lambda: self._begun(machine, step))
        if reason:
            self._note(StepResult.of(step, ranks, "skipped", reason))
            return
        begin, work = time.monotonic(), step.work
        self._note(StepResult.of(step, ranks, "running"))
        if isinstance(work, OneProgram):
            self.close()
            found = self._of_the_first(f"{number}/program", lambda: self._ran(machine, step, work, limit), limit)
            ends = [RankEnd(*found)]
        else:
            ends = self._on_ranks(number, work, ranks, limit)
            if work.ends_ranks or any(end.status != "passed" for end in ends):
                self.close()
        result = judged(step, ends, ranks)
        if cut and all(end.status in ("passed", "hung") for end in ends) and result.status == "failed":
            result = replace(result, status="skipped", said=f"{OUT_OF_TIME}: ended after {limit:.0f} s")
        self.failed |= result.status == "failed"
        self._note(replace(result, seconds=round(time.monotonic() - begin, 1)))

    def _begun(self, machine: AcceptedMachine, step: AcceptanceStep) -> tuple[str, float, bool]:
        """Why a step is skipped, or nothing; how many seconds it has; and whether these are fewer than it may need."""
        limit = step.limit
        if self.deadline is not None and isinstance(step.work, OnRanks) and not step.work.ends_ranks:
            limit = min(limit, IN_HASTE)
        left = math.inf if self.deadline is None else self.deadline - time.monotonic() - PACKING
        reason = machine.missing(step) or (OUT_OF_TIME if left < SHORTEST else "")
        return reason, min(limit, left), left < limit

    def close(self) -> None:
        """End the ranks; the next step starts others."""
        for worker in self._workers:
            worker.close()
        self._workers = {}

    def _of_the_first(self, key: str, make: Callable[[], Any], limit: float = 0.0) -> Any:
        """What the first supervisor makes, on all of them; the others wait so many seconds longer."""
        if self.own.first:
            made = make()
            self.own.store.set(key, json.dumps(made))
            return made
        self.own.store.wait([key], timedelta(seconds=limit + MARGIN))
        return json.loads(self.own.store.get(key))

    def _note(self, result: StepResult) -> None:
        if self.journal is None:
            return
        self.journal.add(result)
        if result.status != "running":
            said = (result.said.splitlines() or [""])[0]
            log.info("%-8s %s, %s: %s", result.status, result.name, result.by, said)

    # -- ranks -----------------------------------------------------------------------------------------

    def _on_ranks(self, number: int, work: OnRanks, ranks: int, limit: float) -> list[RankEnd]:
        """Have all ranks do some work; how it ended on each of them, here and elsewhere."""
        store, failed = self.own.store, f"{number}/failed"

        def spoiled(here: bool) -> bool:
            """Tell the other supervisors of a failure, and hear of theirs."""
            if here:
                store.set(failed, "")
            found: bool = not work.ends_ranks and store.check([failed])
            return found

        ends: list[CallEnd] = []
        if self._workers and (self._variables, self._ranks) != (work.variables, ranks):
            self.close()
        begin = time.monotonic()
        if not self._workers:
            self._start(work.variables, ranks)
            starting = min(STARTING, limit) if self.deadline else STARTING
            met = collect(self._workers, "join the process group", starting, GRACE, spoiled)
            ends = [replace(e, said=f"{NOT_JOINED}: {e.said}") if e.how == "raised" else e for e in met]
        if all(end.how == "returned" for end in ends):
            work = replace(work, args=tuple(self._folder_in(arg) for arg in work.args))
            left = max(1.0, limit - (time.monotonic() - begin)) if self.deadline else limit
            for worker, place in self._workers.items():
                worker.begin(take_part, (place, work), left)
            ends = collect(self._workers, "end", left, GRACE, spoiled)
        late = [end.process for end in ends if end.how == "hung"]
        where = dict(zip(late, stacks(late) if late else (), strict=True))
        for end in ends:
            said = str(end.value) if end.how == "returned" else end.said
            status = "wrong" if isinstance(end.value, WrongResult) else STATUS[end.how]
            told = [status, said, where.get(end.process, end.details)]
            store.set(f"{number}/rank {self._workers[end.process].rank}", json.dumps(told))
        keys = [f"{number}/rank {rank}" for rank in range(ranks)]
        store.wait(keys, timedelta(seconds=STARTING + limit + MARGIN))
        return [RankEnd(rank, *json.loads(store.get(key))) for rank, key in enumerate(keys)]

    def _folder_in(self, argument: Any) -> Any:
        return argument.format(output=self.folder) if isinstance(argument, str) else argument

    def _start(self, variables: tuple[tuple[str, str], ...], ranks: int) -> None:
        """Start the ranks of this supervisor, which join the others."""
        self._variables, self._ranks = variables, ranks
        self._meetings += 1
        for place in self.own.of(ranks):
            worker = Worker(f"rank {place.rank}", self.folder / f"rank{place.rank}-{self._meetings}.log")
            self._workers[worker] = place
            worker.begin(join, (replace(place, meeting=f"meeting {self._meetings}"), variables), STARTING)

    # -- programs --------------------------------------------------------------------------------------

    def _ran(self, machine: AcceptedMachine, step: AcceptanceStep, work: OneProgram, limit: float) -> RankEnd:
        output = self.folder / f"{step.name.replace('/', '-')}.log"
        # A program that watches the time itself has a little less, so that it can end well.
        minutes = f"{max(limit - ENDING, 1.0) / 60:.2f}"
        texts = {"python": sys.executable, "output": str(self.folder), "minutes": minutes}
        dry = work.dry if machine.device == "cpu" else ()
        arguments = [argument.format(**texts) for argument in (*work.arguments, *dry)]
        # By itself it is no rank of anything.
        kept = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHED)}
        root = machine.root or Path.cwd()
        kept["PYTHONPATH"] = os.pathsep.join(filter(None, (str(root), kept.get("PYTHONPATH", ""))))
        with output.open("w", encoding="utf-8") as file, interrupts_reach_programs():
            process = subprocess.Popen(
                arguments, cwd=root, env=kept, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
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
    order = ("wrong", "failed", "died", "hung")  # a rank that hangs mostly waits for one that failed
    wrong = [end for end in ends if end.status in order and not (dying and end.status == "died")]
    wrong.sort(key=lambda end: order.index(end.status))
    if not wrong:
        said = list(dict.fromkeys(end.said for end in ends if end.said))
        return StepResult.of(step, count, "passed", " / ".join(said))
    lines = [f"{f'rank {end.rank} ' if ranks else ''}{end.status}: {end.said}" for end in wrong]
    details = tuple((f"rank {end.rank}, {end.status}", end.details) for end in wrong if end.details)
    found = StepResult.of(step, count, "failed", "\n".join(lines))
    return replace(found, details=details, wrong=wrong[0].status == "wrong")


# -- in the process of a rank ----------------------------------------------------------------------


def join(place: RankPlace, variables: tuple[tuple[str, str], ...]) -> str:
    """Make this process a rank, in an environment with some variables; nothing to say about it."""
    # The package under test and torch read these, the local rank as the index of a device; of a launcher's own they may
    # be something else.
    own = {"RANK": place.rank, "WORLD_SIZE": place.world}
    own |= {"LOCAL_RANK": place.device_index, "LOCAL_WORLD_SIZE": place.near}
    os.environ.update({name: str(value) for name, value in own.items()} | dict(variables))
    join_ranks(place)
    return ""


def take_part(place: RankPlace, work: OnRanks) -> str:
    """Do some work as one of the ranks; what it found."""
    cuda = place.device == "cuda"
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    said = work.function(AcceptanceRank(place.rank, place.world, device), *work.args)
    if cuda:
        torch.cuda.synchronize(device)  # errors of kernels show here at the latest
    gc.collect()  # optimizers hold one another, and recordings their memory
    if cuda:
        torch.cuda.empty_cache()
    return said
