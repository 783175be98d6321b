"""Takes the steps in order, by ranks that it starts, watches and ends; supervisors of several machines go in step.

A supervisor is no rank: it touches no device and no collective, so nothing that a step does can hang or break it. It
starts its ranks in processes of their own, replaces them after every failure, and tells the others through a store what
became of them, so that all of them decide alike.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path

from canzona_compile.compat.torch_private import Store
from canzona_compile.tools.acceptance.journal import AcceptanceJournal
from canzona_compile.tools.acceptance.machine import AcceptedMachine
from canzona_compile.tools.acceptance.rank_process import RankPlace, RankProcess
from canzona_compile.tools.acceptance.step import AcceptanceStep, OneProgram, OnRanks, StepResult

log = logging.getLogger(__name__)

STARTING = 300.0  # seconds until a process has joined the others: imports, contexts, NCCL
GRACE = 10.0  # seconds that the others have once a rank has failed: it need not be the cause
MARGIN = 120.0  # seconds that supervisors wait for one another beyond all limits
PAUSE = 0.1
LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "TORCH_NCCL_ASYNC")


@dataclass(frozen=True, slots=True)
class Fellowship:
    """Which of the ranks a supervisor has, and where all of them meet.

    Attributes:
        ranks: those of this supervisor.
        world: how many there are on all machines.
        local: the first one's number on its machine.
        near: how many ranks its machine has, of all supervisors.
        store: of the supervisors.
        host, port: where ranks find the same store.
    """

    ranks: range
    world: int
    local: int
    near: int
    store: Store
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class RankEnd:
    """How a rank ended a step.

    Attributes:
        status: "hung" if it was ended by its supervisor; "died" if its process ended.
        said: what it found, or what was wrong.
        details: a traceback, or the stacks of its threads.
    """

    rank: int
    status: str
    said: str
    details: str = ""


class Supervisor:
    """Takes steps with the ranks of a fellowship.

    Args:
        fellowship: which of the ranks are this one's.
        machine: the machine.
        journal: takes the results; None on all but the first supervisor.
        folder: for logs and results of programs.
        patience: seconds of the process groups' timeouts.
    """

    def __init__(
        self,
        fellowship: Fellowship,
        machine: AcceptedMachine,
        journal: AcceptanceJournal | None,
        folder: Path,
        patience: float,
    ) -> None:
        self.own, self.machine, self.journal, self.folder = fellowship, machine, journal, folder
        self.patience, self.failed = patience, False
        self._processes: list[RankProcess] = []
        self._variables: tuple[tuple[str, str], ...] = ()
        self._ready: set[int] = set()
        self._meetings = 0

    def take(self, number: int, step: AcceptanceStep) -> None:
        """Take a step, unless something is missing; all supervisors call this with the same steps."""
        if reason := self._decided(f"{number}/missing", self.machine.missing(step)):
            self._note(StepResult.of(step, "skipped", reason))
            return
        begin = time.monotonic()
        self._note(StepResult.of(step, "running"))
        if isinstance(step.work, OneProgram):
            self.close()
            ends = [self._of_program(number, step, step.work)]
        else:
            ends = self._on_ranks(number, step, step.work)
            if step.work.ends_ranks or any(end.status != "passed" for end in ends):
                self.close()
        result = judged(step, ends)
        self.failed |= result.status == "failed"
        self._note(replace(result, seconds=round(time.monotonic() - begin, 1)))

    def close(self) -> None:
        """End the ranks; the next step starts others."""
        for process in self._processes:
            process.close()
        self._processes, self._ready = [], set()

    # -- what supervisors tell one another -------------------------------------------------------------

    def _decided(self, key: str, value: str) -> str:
        """The first supervisor's value, on all of them."""
        if 0 in self.own.ranks:
            self.own.store.set(key, value)
            return value
        self.own.store.wait([key], timedelta(seconds=MARGIN))
        found: bytes = self.own.store.get(key)
        return found.decode()

    def _note(self, result: StepResult) -> None:
        if self.journal is None:
            return
        self.journal.add(result)
        if result.status != "running":
            log.info("%-8s %s: %s", result.status, result.name, (result.said.splitlines() or [""])[0])

    # -- ranks -----------------------------------------------------------------------------------------

    def _on_ranks(self, number: int, step: AcceptanceStep, work: OnRanks) -> list[RankEnd]:
        """Have all ranks do some work; how it ended on each of them, here and elsewhere."""
        if self._processes and self._variables != work.variables:
            self.close()
        if not self._processes:
            self._start(work.variables)
        store, pending = self.own.store, dict(enumerate(self._processes))
        deadlines = dict.fromkeys(pending, time.monotonic() + STARTING)
        for i in pending:
            if i in self._ready:
                deadlines[i] = self._begin(i, work, step.limit)
        while pending:
            ends: list[RankEnd] = []
            for i in [i for i, p in pending.items() if p.end in connection.wait([p.end], 0)]:
                found = pending[i].answer()
                rank = pending[i].place.rank
                if found is None:
                    code = pending[i].exit_code()
                    ends.append(RankEnd(rank, "died", f"its process ended, exit code {code}", pending.pop(i).tail()))
                elif found[0] == "ready":
                    self._ready.add(i)
                    deadlines[i] = self._begin(i, work, step.limit)
                else:
                    ends.append(RankEnd(rank, *found))
                    pending.pop(i)
            if any(end.status != "passed" for end in ends):
                store.set(f"{number}/failed", "")
            after = not work.ends_ranks and bool(pending) and store.check([f"{number}/failed"])
            if after:
                deadlines = {i: min(d, time.monotonic() + GRACE) for i, d in deadlines.items()}
            late = [i for i in pending if time.monotonic() > deadlines[i]]
            for i in late:
                where = f"did not join the process group within {STARTING:g} seconds"
                if i in self._ready:
                    where = f"did not end within {step.limit:g} seconds"
                if after:
                    where = f"did not end within {GRACE:g} seconds of the failure of another rank"
                ends.append(RankEnd(pending[i].place.rank, "hung", where, pending[i].stacks()))
            for i in late:  # only when all of them have said where they are: the end of one changes the others
                pending.pop(i).close()
            for end in ends:
                store.set(f"{number}/rank {end.rank}", json.dumps([end.status, end.said, end.details]))
            if not ends and pending:
                connection.wait([process.end for process in pending.values()], PAUSE)
        keys = [f"{number}/rank {rank}" for rank in range(self.own.world)]
        store.wait(keys, timedelta(seconds=STARTING + step.limit + MARGIN))
        return [RankEnd(rank, *json.loads(store.get(key))) for rank, key in enumerate(keys)]

    def _begin(self, i: int, work: OnRanks, limit: float) -> float:
        self._processes[i].begin(work, limit)
        return time.monotonic() + limit

    def _start(self, variables: tuple[tuple[str, str], ...]) -> None:
        own, self._variables = self.own, variables
        self._meetings += 1
        for i, rank in enumerate(own.ranks):
            place = RankPlace(
                rank=rank,
                world=own.world,
                local=own.local + i,
                near=own.near,
                device=self.machine.device,
                tiny=self.machine.device == "cpu",
                host=own.host,
                port=own.port,
                meeting=f"meeting {self._meetings}",
                patience=self.patience,
                variables=variables,
            )
            self._processes.append(RankProcess(place, self.folder / f"rank{rank}-{self._meetings}.log"))

    # -- programs --------------------------------------------------------------------------------------

    def _of_program(self, number: int, step: AcceptanceStep, work: OneProgram) -> RankEnd:
        """Run a program by the first supervisor, while the others wait."""
        key, end = f"{number}/program", RankEnd(0, "passed", "")
        if 0 in self.own.ranks:
            end = self._ran(step, work)
            self.own.store.set(key, json.dumps([end.status, end.said, end.details]))
            return end
        self.own.store.wait([key], timedelta(seconds=step.limit + MARGIN))
        return RankEnd(0, *json.loads(self.own.store.get(key)))

    def _ran(self, step: AcceptanceStep, work: OneProgram) -> RankEnd:
        output = self.folder / f"{step.name.replace('/', '-')}.log"
        texts = {"python": sys.executable, "output": str(self.folder)}
        arguments = [argument.format(**texts) for argument in work.arguments]
        # By itself it is no rank of anything.
        kept = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHED)}
        root = self.machine.root or Path.cwd()
        kept["PYTHONPATH"] = os.pathsep.join(filter(None, (str(root), kept.get("PYTHONPATH", ""))))
        with output.open("w", encoding="utf-8") as file:
            process = subprocess.Popen(
                arguments, cwd=root, env=kept, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                code = process.wait(step.limit)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # with what it has started
                process.wait()
                return RankEnd(0, "hung", f"did not end within {step.limit:g} seconds", tail(output))
        if code:
            return RankEnd(0, "failed", f"exit code {code}: {last_line(output)}", tail(output))
        return RankEnd(0, "passed", last_line(output))


def judged(step: AcceptanceStep, ends: list[RankEnd]) -> StepResult:
    """The result of a step from how it ended on each rank."""
    ranks = isinstance(step.work, OnRanks)
    dying = isinstance(step.work, OnRanks) and step.work.ends_ranks
    order = ("failed", "died", "hung")  # a rank that hangs mostly waits for one that failed
    wrong = [end for end in ends if end.status in order and not (dying and end.status == "died")]
    wrong.sort(key=lambda end: order.index(end.status))
    if not wrong:
        said = list(dict.fromkeys(end.said for end in ends if end.said))
        return StepResult.of(step, "passed", " / ".join(said))
    lines = [f"{f'rank {end.rank} ' if ranks else ''}{end.status}: {end.said}" for end in wrong]
    details = tuple((f"rank {end.rank}, {end.status}", end.details) for end in wrong if end.details)
    return replace(StepResult.of(step, "failed", "\n".join(lines)), details=details)


def tail(path: Path, lines: int = 80) -> str:
    """The end of a file."""
    return "\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])


def last_line(path: Path) -> str:
    """The last line of a file that says something."""
    lines = [line.strip() for line in tail(path).splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"
