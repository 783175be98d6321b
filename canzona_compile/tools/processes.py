"""Functions in processes of their own: the result of each, or the failure that the others follow from.

torch starts the processes, and ends the others when one fails. This file adds what a tool needs beside that: results,
errors that keep their class, a limit of time after which every process says where it is, and one place in which ranks
find one another.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessContext, ProcessExitedException, start_processes

from canzona_compile.errors import CanzonaError
from canzona_compile.progress.telling import heard_by, tell

# A forked process would inherit locks that are held and threads that it does not have. A fork server would keep the
# environment and the standard error that the caller had when its first process started.
START_METHOD = "spawn"
GRACE = 1.0  # seconds that the others have to fail as well: the first process that ends need not be the cause
NEWS = 0.2  # seconds after which the caller looks for what processes tell
HEARD = "heard"  # the file that has the last words of progress
LAST_WORDS = 2.0  # seconds that processes have to say where they are once the limit is over
UNGUARDED = "if a script starts this, do so below `if __name__ == '__main__':`; what the process said is above"


@dataclass(frozen=True, slots=True)
class ProcessCall:
    """What one process does.

    Attributes:
        name: what errors call the process, as in "rank 1".
        function: a function that a module defines at its top level.
        args: its arguments; they and the result are pickled.
    """

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]


def run(jobs: Sequence[ProcessCall], limit: float) -> list[Any]:
    """Run all jobs at the same time, each in a process with one thread.

    A job's standard output goes to standard error: the caller's standard output is for data. No process is left when
    this returns or raises.

    Args:
        jobs: what to run.
        limit: seconds until the processes are ended.

    Returns:
        The result of each job, in the order of the jobs.

    Raises:
        CanzonaError: a job raised it, with the traceback as a note; or a job raised another exception; or a process
            died; or the limit is over.
    """
    level = logging.getLogger("canzona_compile").getEffectiveLevel()
    deadline = time.monotonic() + limit
    with tempfile.TemporaryDirectory(prefix="canzona-jobs-") as folder:
        answers = [Path(folder, str(i)) for i in range(len(jobs))]
        args = (tuple(jobs), folder, deadline, level)
        context = start_processes(serve, args, nprocs=len(jobs), join=False, start_method=START_METHOD)
        assert context is not None
        done = False
        try:
            while not done:
                left = max(0.0, deadline + LAST_WORDS - time.monotonic())
                done = context.join(min(left, NEWS), GRACE)
                pass_on(Path(folder, HEARD))
                for job, process, path in zip(jobs, context.processes, answers, strict=True):
                    if process.exitcode == 0 and not path.exists():
                        raise death(job, 0)
                if not done and time.monotonic() >= deadline + LAST_WORDS:
                    raise late(jobs, answers, limit)
        except ProcessExitedException as ended:
            raise failure(jobs, answers, context, ended.error_index, deadline, limit) from None
        finally:
            for process in context.processes:
                process.kill()
                process.join()
        return [pickle.loads(path.read_bytes()) for path in answers]


def failure(
    jobs: Sequence[ProcessCall],
    answers: Sequence[Path],
    context: ProcessContext,
    first: int,
    deadline: float,
    limit: float,
) -> CanzonaError:
    """The failure that the others follow from: a process that died, otherwise the exception that was raised first.

    Args:
        jobs, answers: the jobs, and the files in which their processes leave results or errors.
        context: the processes, all of which have ended.
        first: the process that torch saw fail first. torch has ended the others with SIGTERM.
        deadline: when the limit is over, by `time.monotonic`; processes then end by themselves with exit code 1.
        limit: seconds.
    """
    codes = [process.exitcode for process in context.processes]
    silent = [i for i, path in enumerate(answers) if not path.exists()]
    over = time.monotonic() >= deadline
    for i in silent:
        if (i == first or codes[i] != -signal.SIGTERM) and not (over and codes[i] == 1):
            return death(jobs[i], codes[i])
    for path in sorted((path for path in answers if path.exists()), key=lambda path: path.stat().st_mtime_ns):
        answer = pickle.loads(path.read_bytes())
        if isinstance(answer, CanzonaError):
            answer.add_note(f"in the process {jobs[int(path.name)].name!r}")
            return answer
    return late(jobs, answers, limit)


def death(job: ProcessCall, code: int) -> CanzonaError:
    """The error of a process that ended without an answer, by its exit code."""
    if code < 0:
        memory = "is there memory for a copy of the model per process?"
        hint = memory if -code == signal.SIGKILL else "what it said is above"
        return CanzonaError(f"{job.name} was killed by {signal.Signals(-code).name}", hint=hint)
    return CanzonaError(f"{job.name} ended by itself with exit code {code}", hint=UNGUARDED)


def late(jobs: Sequence[ProcessCall], answers: Sequence[Path], limit: float) -> CanzonaError:
    """The error of processes that did not answer in time."""
    names = ", ".join(job.name for job, path in zip(jobs, answers, strict=True) if not path.exists())
    hint = "allow more with limit=; where they were is above"
    return CanzonaError(f"no result within {limit:g} seconds", at=names, hint=hint)


def pass_on(path: Path) -> None:
    """Tell what a process has told last, if there is anything new."""
    if not path.exists():
        return
    words, done, total = json.loads(path.read_text(encoding="utf-8"))
    path.unlink()
    tell(words, done, total)


# -- in a process ----------------------------------------------------------------------------------


def serve(index: int, jobs: Sequence[ProcessCall], folder: str, deadline: float, level: int) -> None:
    """Run one of the jobs, leave its result or its error in a file of `folder`, and end this process.

    The process ends itself, and says on standard error where it is, once the deadline is over: then none outlives a
    caller that was killed for long.
    """
    os.dup2(2, 1)
    faulthandler.dump_traceback_later(max(0.01, deadline - time.monotonic()), exit=True)
    logging.basicConfig(level=level, format="%(message)s")

    def hear(words: str, done: int = 0, total: int = 0) -> None:
        """Leave the words where the caller looks for them, in one piece."""
        said = Path(folder, f"{HEARD}.{index}")
        said.write_text(json.dumps([words, done, total]), encoding="utf-8")
        said.rename(Path(folder, HEARD))

    torch.set_num_threads(1)  # exactness is promised for equally many threads
    leave_no_locks()
    job, code = jobs[index], 0
    try:
        try:
            with heard_by(hear):
                answer = pickle.dumps(job.function(*job.args))
        except CanzonaError as error:
            answer, code = pickle.dumps(error), 1
    except (Exception, SystemExit) as error:
        hint = "this should not happen: please report it"
        failed, code = CanzonaError(f"{job.name} raised {type(error).__name__}: {error}", hint=hint), 1
        failed.add_note(traceback.format_exc().rstrip())
        answer = pickle.dumps(failed)
    unfinished = Path(folder, f"{index}.unfinished")
    unfinished.write_bytes(answer)
    unfinished.rename(Path(folder, str(index)))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # without farewells: other ranks may be dead


def leave_no_locks() -> None:
    """Let this process make locks without names.

    It ends without farewells. Under spawn a lock, as torch.fx makes one, has a name, which would stay, and Python would
    warn of it at the end of the command.
    """
    multiprocessing.set_start_method("fork", force=True)


def join_ranks(rank: int, ranks: int, folder: str, timeout: timedelta) -> None:
    """Make this process one of the gloo ranks that meet in a folder of this machine.

    Args:
        rank, ranks: this one, and how many there are.
        folder: an empty folder; the ranks find one another by a file in it, which outlives any of them.
        timeout: of every collective.
    """
    if "lo" in (name for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a host's own name need not resolve
    meeting = Path(folder, "ranks").as_uri()
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks, timeout=timeout)
