"""Functions in processes of their own: what each returned, or the first failure; none is left behind."""

from __future__ import annotations

import faulthandler
import logging
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import connection, parent_process
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing import get_context

from canzona_compile.errors import CanzonaError
from canzona_compile.tools.verification.failure import CannotVerify, blamed

GRACE = 1.0  # seconds in which others that fail are heard too: the first to end need not be the cause
BEFORE = "if a script calls verify, do so below `if __name__ == '__main__':`; what the process said is above"


@dataclass(frozen=True, slots=True)
class Job:
    """A function of an importable module, its arguments, and what to call the process."""

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]


def run(jobs: Sequence[Job], limit: float) -> list[Any]:
    """Run all jobs at the same time, one thread each; their results, in order.

    Standard output of the jobs goes to standard error: that of the caller is for data.

    Raises:
        CanzonaError: what a job raised, with its traceback as a note.
        CannotVerify: a process died, or `limit` seconds are over.
    """
    context = get_context("spawn")  # forked ranks would inherit locked locks and other people's threads
    level = logging.getLogger("canzona_compile").getEffectiveLevel()
    with tempfile.TemporaryDirectory(prefix="canzona-verify-") as folder:
        answers = [Path(folder, str(i)) for i in range(len(jobs))]
        processes: list[SpawnProcess] = []
        try:
            for job, path in zip(jobs, answers, strict=True):
                process = context.Process(target=serve, args=(job.function, job.args, str(path), level), name=job.name)
                process.start()
                processes.append(process)
            supervise(processes, answers, limit)
            return [pickle.loads(path.read_bytes()) for path in answers]
        finally:
            for process in processes:
                process.kill()
                process.join()


def supervise(processes: Sequence[SpawnProcess], answers: Sequence[Path], limit: float) -> None:
    """Wait until all have answered; raise what is wrong as soon as one has not."""
    deadline = time.monotonic() + limit
    running = {process.sentinel: process for process in processes}
    while running:
        ended = connection.wait(list(running), max(0.0, deadline - time.monotonic()))
        for sentinel in ended:
            running.pop(sentinel).join()  # type: ignore[arg-type]
        if not ended:
            raise late(list(running.values()), limit)
        if any(p.exitcode for p in processes):
            connection.wait(list(running), GRACE)
            raise cause(processes, answers)


def cause(processes: Sequence[SpawnProcess], answers: Sequence[Path]) -> CanzonaError:
    """The failure that the others follow from: a death, otherwise what was raised first."""
    failed = [(p, path) for p, path in zip(processes, answers, strict=True) if p.exitcode]
    for process, path in failed:
        if not path.exists():
            return death(process)
    process, path = min(failed, key=lambda one: one[1].stat().st_mtime_ns)
    error: CanzonaError = pickle.loads(path.read_bytes())
    error.add_note(f"in the process {process.name!r}")
    return error


def death(process: SpawnProcess) -> CannotVerify:
    code = process.exitcode or 0
    if code < 0:
        memory = "is there memory for a copy of the model per process?"
        hint = memory if -code == signal.SIGKILL else "what it said is above"
        return CannotVerify(f"{process.name} was killed by {signal.Signals(-code).name}", hint=hint)
    return CannotVerify(f"{process.name} ended by itself with exit code {code}", hint=BEFORE)


def late(running: Sequence[SpawnProcess], limit: float) -> CannotVerify:
    """Time is over: have everybody say on standard error where it is."""
    for process in running:
        if process.pid is not None and process.is_alive():
            os.kill(process.pid, signal.SIGUSR1)
    time.sleep(0.5)
    names = ", ".join(process.name for process in running)
    return CannotVerify(
        f"no result within {limit:g} seconds", at=names, hint="allow more with limit=; where they were is above"
    )


# -- in a process ----------------------------------------------------------------------------------


def serve(function: Callable[..., Any], args: tuple[Any, ...], path: str, level: int) -> None:
    """Run one job and leave its result, or its error, in a file."""
    os.dup2(2, 1)
    faulthandler.register(signal.SIGUSR1)
    threading.Thread(target=follow_parent, daemon=True).start()
    logging.basicConfig(level=level, format="%(message)s")
    torch.set_num_threads(1)  # exactness is promised for equally many threads
    answer, code = None, 0
    try:
        with blamed("verify itself", "this should not happen: please report it"):
            answer = function(*args)
    except CanzonaError as error:
        answer, code = error, 1
    unfinished = Path(f"{path}.unfinished")
    unfinished.write_bytes(pickle.dumps(answer))
    unfinished.rename(path)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # no farewells: other ranks may be dead


def follow_parent() -> None:
    """Do not outlive the process that waits for the answer."""
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)
