"""Processes that do what they are asked for: what each of them returned, or how it failed.

All tools start their ranks here. A process is asked over a pipe, as often as its owner likes. While it works it can be
asked where it is, and it can be ended whatever it does. `run_ranks` asks once and raises the failure from which the
others follow.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from canzona_compile.compat.telling import heard_by, tell
from canzona_compile.compat.torch_private import TCPStore, signal_when_parent_dies
from canzona_compile.errors import CanzonaError

# A forked process would inherit locks that are held and threads that it does not have, and could not use CUDA. A fork
# server would keep the environment and the standard error that the caller had when its first process started.
START_METHOD = "spawn"
GRACE = 1.0  # seconds that the others have to fail as well: the first process that ends need not be the cause
LAST_WORDS = 2.0  # seconds in which a process says where its threads are
SPARE = 60.0  # seconds beyond the limit after which a process ends itself, should its owner not do so
JOIN = 30.0  # seconds to connect to a store on this machine, which is there already
A_DAY = 86400.0  # seconds: the longest call whose limit begins again with every word of progress
TAIL = 120  # lines of a log
HERE = "127.0.0.1"
UNGUARDED = "in a script, make this call under `if __name__ == '__main__':`; the output of the process is above"


@dataclass(frozen=True, slots=True)
class ProcessCall:
    """What one process does.

    Attributes:
        function: a function that a module defines at its top level.
        args: its arguments; they and the result are pickled.
    """

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class CallEnd:
    """How a call ended.

    Attributes:
        how: "hung" if it did not end in time; "died" if its process ended.
        details: a traceback, or the end of the log with the stacks of all threads.
        value: what was returned, or the error if it is one of ours.
    """

    process: Worker
    how: Literal["returned", "raised", "died", "hung"]
    said: str = ""
    details: str = ""
    value: Any = None


class Worker:
    """A process, as its owner sees it.

    Args:
        log: the file to which it writes. Without one it writes to the caller's standard error, also what is meant for
            standard output: that of the caller is for data.

    Attributes:
        told: the last words on its progress.
    """

    def __init__(self, name: str, log: Path | None = None) -> None:
        self.name, self.log, self.told = name, log, ""
        level = logging.getLogger("canzona_compile").getEffectiveLevel()
        context: Any = multiprocessing.get_context(START_METHOD)
        self.end, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, log, level), name=name)
        self.process.start()
        theirs.close()

    def begin(self, function: Callable[..., Any], args: tuple[Any, ...], limit: float) -> None:
        """Call a function there; see `ProcessCall`. The process ends itself some time after `limit` seconds."""
        with contextlib.suppress(OSError):  # its death is found by who waits for the end of the call
            self.end.send((function, args, limit))

    def heard(self) -> CallEnd | None:
        """Read what it has said: None if that was only how far it is. There has to be something to read."""
        try:
            how, *words = self.end.recv()
        except (EOFError, OSError):
            return CallEnd(self, "died", f"its process ended, exit code {self.exit_code()}", tail(self.log))
        if how == "told":
            self.told = words[0]
            tell(*words)
            return None
        return CallEnd(self, how, *words)

    def exit_code(self) -> int | None:
        """The exit code of a process that ends or has ended; None if it did not end."""
        self.process.join(5.0)
        code: int | None = self.process.exitcode
        return code

    def close(self) -> None:
        """End it, whatever it does."""
        self.end.close()
        self.process.kill()
        self.process.join()


def collect(
    workers: Iterable[Worker], act: str, limit: float, grace: float | None, *, renewed: bool = False
) -> list[CallEnd]:
    """Wait until all processes have ended their calls, or are late.

    Args:
        act: what they do, for the words about those that are late: "did not {act} within 3 seconds".
        limit: seconds for the call.
        grace: seconds that the others have once one has failed, which need not be the cause; None if they have the
            whole limit.
        renewed: whether the limit begins again whenever one of them says how far it is.
    """
    deadline, pending, ends = time.monotonic() + limit, list(workers), list[CallEnd]()
    said, failed = f"did not {act} within {limit:g} seconds", False
    while pending and time.monotonic() < deadline:
        ready = connection.wait([worker.end for worker in pending], deadline - time.monotonic())
        heard = [worker.heard() for worker in pending if worker.end in ready]
        ends += filter(None, heard)
        if renewed and not failed and None in heard:
            deadline = time.monotonic() + limit
        ended = {end.process for end in ends}
        pending = [worker for worker in pending if worker not in ended]
        if grace is not None and not failed and any(end.how != "returned" for end in ends):
            failed, deadline = True, min(deadline, time.monotonic() + grace)
            said = f"did not {act} within {grace:g} seconds of the failure of another rank"
    return [*ends, *(CallEnd(worker, "hung", said) for worker in pending)]


def stacks(workers: Sequence[Worker]) -> list[str]:
    """Have processes write where each of their threads is, even if C code waits for the device; the ends of the logs.

    Nobody ends one of them before all have answered: its end changes the others.
    """
    for worker in workers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.process.pid, signal.SIGUSR1)
    time.sleep(LAST_WORDS if workers else 0.0)
    return [tail(worker.log) for worker in workers]


def tail(log: Path | None) -> str:
    """The last lines of a log; nothing if there is none."""
    if log is None or not log.exists():
        return ""
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL:])


# -- one call for each ------------------------------------------------------------------------------


def run(calls: Sequence[ProcessCall], limit: float) -> list[Any]:
    """Make all calls at the same time, each in a process with one thread. None is left when this returns or raises.

    Args:
        limit: seconds until the processes are ended.
    """
    deadline = time.monotonic() + limit
    with started(calls) as workers:
        ends = asked(workers, calls, deadline - time.monotonic())
    for how in ("died", "raised", "hung"):  # the first death, otherwise the exception that was raised first
        if failed := [end for end in ends if end.how == how]:
            raise failure(failed, limit)
    values = {end.process: end.value for end in ends}
    return [values[worker] for worker in workers]


@contextlib.contextmanager
def started(calls: Sequence[ProcessCall]) -> Iterator[list[Worker]]:
    """Inside this context there is a process for each call."""
    with contextlib.ExitStack() as stack:
        workers = []
        for call in calls:
            workers.append(Worker(call.name))
            stack.callback(workers[-1].close)
        yield workers


def asked(
    workers: Sequence[Worker], calls: Sequence[ProcessCall], limit: float, *, renewed: bool = False
) -> list[CallEnd]:
    """Make each call in its process: how they ended, the first end first. If some do nothing but hang, they say where.

    Args:
        limit, renewed: see `collect`.
    """
    for worker, call in zip(workers, calls, strict=True):
        worker.begin(call.function, call.args, A_DAY if renewed else limit)
    ends = collect(workers, "end", limit, GRACE, renewed=renewed)
    if {end.how for end in ends} <= {"returned", "hung"}:
        stacks([end.process for end in ends if end.how == "hung"])
    return ends


def failure(ends: Sequence[CallEnd], limit: float) -> CanzonaError:
    """The error of calls that ended in the same way, of which the first one counts, or all that hung."""
    first = ends[0]
    name = first.process.name
    if first.how == "hung":
        hint = "raise the limit with limit=; the stacks of the processes are above"
        names = ", ".join(end.process.name for end in ends)
        return CanzonaError(f"no result within {limit:g} seconds", at=names, hint=hint)
    if first.how == "died":
        code = first.process.exit_code()
        if code is None or code >= 0:
            return CanzonaError(f"{name} exited with code {code}", hint=UNGUARDED)
        memory = "check that there is memory for one copy of the model per process"
        hint = memory if -code == signal.SIGKILL else "its output is above"
        return CanzonaError(f"{name} was killed by {signal.Signals(-code).name}", hint=hint)
    error: CanzonaError | None = first.value
    if error is None:
        error = CanzonaError(f"{name} raised {first.said}", hint="this should not happen: please report it")
        error.add_note(first.details.rstrip())
    error.add_note(f"in the process {name!r}")
    return error


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Which rank a process of this machine is, and where it meets the others.

    Attributes:
        device: the kind of device, "cuda" or "cpu".
        patience: seconds of a collective's timeout.
    """

    rank: int
    world: int
    device: str
    port: int
    patience: float

    @property
    def device_index(self) -> int:
        """Which of this machine's GPUs it uses. Ranks share them by turns if there are more ranks than GPUs."""
        return self.rank % torch.cuda.device_count() if self.device == "cuda" else self.rank


def backend_for(device: str, ranks: int) -> str:
    """NCCL where each rank has a GPU of its own, gloo elsewhere: NCCL does not run two ranks on one device.

    Gloo's collectives take tensors on CUDA as well, and copy them through the host.
    """
    return "nccl" if device == "cuda" and ranks <= torch.cuda.device_count() else "gloo"


def places_here(ranks: int, device: str, patience: float) -> tuple[tuple[RankPlace, ...], TCPStore]:
    """The places of some ranks, and the store in which they meet while somebody holds it; see `RankPlace`."""
    try:
        store = TCPStore(HERE, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=JOIN))
    except RuntimeError as error:
        raise CanzonaError(
            f"processes of this machine cannot connect to one another: {HERE} is not reachable",
            hint="turn on the loopback interface, for example: ip link set lo up",
        ) from error
    return tuple(RankPlace(rank, ranks, device, store.port, patience) for rank in range(ranks)), store


def run_ranks(
    ranks: int,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    limit: float,
    *,
    beside: Sequence[ProcessCall] = (),
) -> list[Any]:
    """Run a function on gloo ranks of this machine: what it returned on each of them.

    Args:
        limit: seconds until the processes are ended, and of a collective's timeout.
        beside: what else to run meanwhile, in processes that are no ranks. Its results are left out.
    """
    calls, _store = rank_calls(ranks, function, args, limit)
    return run([*beside, *calls], limit)[len(beside) :]


def rank_calls(
    ranks: int, function: Callable[..., Any], args: tuple[Any, ...], patience: float
) -> tuple[list[ProcessCall], TCPStore]:
    """The calls of `run_ranks`, and the store in which the ranks meet while somebody holds it."""
    places, store = places_here(ranks, "cpu", patience)
    return [ProcessCall(f"rank {place.rank}", as_rank, (place, function, args)) for place in places], store


# -- in a process ----------------------------------------------------------------------------------


def serve(end: Connection, log: Path | None, level: int) -> None:
    """The life of a process: do what it is asked for until the other end closes."""
    signal_when_parent_dies(signal.SIGKILL)
    if log is not None:
        with log.open("w", encoding="utf-8") as file:
            os.dup2(file.fileno(), 2)
    os.dup2(2, 1)
    faulthandler.enable()
    # By the C signal handler: also of a thread that waits for a device or for a peer.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    logging.basicConfig(level=level, format="%(message)s")
    torch.set_num_threads(1)  # exactness is promised for equally many threads
    leave_no_locks()

    def hear(words: str, done: int = 0, total: int = 0) -> None:
        end.send(("told", words, done, total))

    with contextlib.suppress(EOFError, OSError, KeyboardInterrupt), heard_by(hear):  # until the other end is closed
        while True:
            function, args, limit = end.recv()
            faulthandler.dump_traceback_later(limit + SPARE, exit=True)
            answer = reply(function, args)
            faulthandler.cancel_dump_traceback_later()
            end.send_bytes(answer)
    os._exit(0)  # without farewells: other ranks may be dead


def reply(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """Call a function; what `Worker.heard` reads of it."""
    try:
        return pickle.dumps(("returned", "", "", function(*args)))
    except BaseException as error:
        ours = isinstance(error, CanzonaError)
        said = str(error) if ours else f"{type(error).__name__}: {error}"  # ours say enough without their class
        return pickle.dumps(("raised", said, traceback.format_exc(), error if ours else None))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def leave_no_locks() -> None:
    """Let this process make locks without names.

    It ends without farewells. Under spawn a lock, as torch.fx makes one, has a name, which would stay, and Python would
    warn of it at the end of the command.
    """
    multiprocessing.set_start_method("fork", force=True)


def as_rank(place: RankPlace, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Call `function(rank, *args)` once this process is a rank."""
    join_ranks(place)
    return function(place.rank, *args)


def join_ranks(place: RankPlace) -> None:
    """Make this process a rank, with its device as the current one."""
    device = torch.device("cpu")
    if place.device == "cuda":
        device = torch.device("cuda", place.device_index)
        torch.cuda.init()  # a mesh keeps the current device only if CUDA is in use
        torch.cuda.set_device(device)
    backend = backend_for(place.device, place.world)
    if backend == "gloo" and "lo" in (name for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a host's own name need not resolve
    timeout = timedelta(seconds=place.patience)
    store = TCPStore(HERE, place.port, is_master=False, timeout=timedelta(seconds=JOIN))
    store.set_timeout(timeout)  # other ranks may come later
    dist.init_process_group(
        backend,
        store=store,
        rank=place.rank,
        world_size=place.world,
        timeout=timeout,
        device_id=device if backend == "nccl" else None,
    )
