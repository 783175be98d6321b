"""Functions on W ranks, quickly.

    results = run(4, work, "fsdp", dtype=torch.float32)  # work("fsdp", ...) on ranks 0 to 3

Ranks are processes that live as long as the session, one pool per number of ranks, each with a
default process group of gloo. They are forked from a process that has imported torch (`nursery`), so
that a pool takes a fraction of a second. Work is named by module and function: it has to be importable.

    results = run(4, work, "fsdp", after=partial(work, "plain"))  # what ranks share is made once, before the fork

An exception on any rank is raised here with that rank's traceback; ranks that do not answer in time
are an error that shows where they hang. Either way the pool is replaced before its next use. So it is
where a call left a broken channel, because nothing else can be bound on these ranks, and where it made
an optimizer forget its captures, because ranks may have captured other things before.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import gc
import os
import pickle
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import Pipe, connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from canzona_compile.runtime import channel
from tests.harness import optimizers
from tests.harness.nursery import Child, answer, call_of, nursery, write_to

LIMIT = 300.0  # seconds that a call may take; only a hang takes so long
PATIENCE = 4 * LIMIT  # seconds: timeout of the process groups. A rank that waits for it hangs, and fails its test
GRACE = 20.0  # seconds that the others have to answer once a rank has failed, and that a process has to end


class RankFailure(AssertionError):
    """A function raised, died or hung on some rank."""


@dataclass(frozen=True, slots=True)
class Died:
    """What a rank that was expected to die returned."""

    code: int | None


def run(
    world: int,
    function: Callable[..., Any],
    *args: Any,
    fresh: bool = False,
    group: bool = True,
    dying: Collection[int] = (),
    limit: float = LIMIT,
    after: functools.partial[Any] | None = None,
    **kwargs: Any,
) -> list[Any]:
    """`function(*args, **kwargs)` on `world` ranks; what it returned, by rank.

    Args:
        function: of a module that can be imported. Arguments and result are pickled.
        fresh: in a pool of its own, thrown away afterwards: for work that breaks its process group.
        group: give the ranks a default process group.
        dying: ranks that end their process; their result is `Died`.
        limit: seconds until a rank that has not answered counts as hanging, which is shorter than any timeout.
        after: a call that the ranks have behind them. It is made once, without a process group, in the process
            from which they are forked, so that what it captures and caches is there on every rank.
    """
    before = None if after is None else call_of(after.func, *after.args, **after.keywords)
    if before is not None:
        nursery().do(before)
    if fresh or dying:
        pool = Pool(world, group)
        try:
            return pool.run(function, args, kwargs, dying, limit)
        finally:
            pool.close()
    pool = pool_of(world, group)
    if pool.broken or (before is not None and before not in pool.behind):
        drop(world, group)
        pool = pool_of(world, group)
    try:
        return pool.run(function, args, kwargs, (), limit)
    except BaseException:
        drop(world, group)
        raise


def do_alone(call: functools.partial[Any]) -> None:
    """Make a call in the process that ranks are forked from.

    A test of one process that does so captures what tests on ranks need after it.
    """
    nursery().do(call_of(call.func, *call.args, **call.keywords), strictly=True)


# -- pools -----------------------------------------------------------------------------------------

_pools: dict[tuple[int, bool], Pool] = {}


def pool_of(world: int, group: bool) -> Pool:
    if (world, group) not in _pools:
        _pools[world, group] = Pool(world, group)
    return _pools[world, group]


def drop(world: int, group: bool) -> None:
    """Close a pool, so that its next use makes a new one."""
    if (world, group) in _pools:
        _pools.pop((world, group)).close()


@atexit.register
def close_all() -> None:
    for key in list(_pools):
        drop(*key)
    if nursery.cache_info().currsize:
        nursery().close()


class Pool:
    """Some ranks, and the store through which they find each other; the store outlives any rank."""

    def __init__(self, world: int, group: bool) -> None:
        self.behind = nursery().done
        self.broken = False
        self._logs = tempfile.TemporaryDirectory(prefix="canzona-ranks-")
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if group else None
        port = self._store.port if self._store else None
        self._ends: list[Connection] = []
        self._processes: list[Child] = []
        for rank in range(world):
            mine, theirs = Pipe()
            self._ends.append(mine)
            self._processes.append(nursery().fork(theirs, serve, rank, world, port, str(self._log(rank))))
            theirs.close()

    def run(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        dying: Collection[int],
        limit: float,
    ) -> list[Any]:
        job = call_of(function, *args, **kwargs)
        for end in self._ends:
            with contextlib.suppress(OSError):  # a dead rank is found below
                end.send_bytes(job)
        results: dict[int, Any] = {}
        failures: list[str] = []
        deadline = time.monotonic() + limit
        while waiting := {e: r for r, e in enumerate(self._ends) if r not in results}:
            ready = connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
            for rank in [rank for end, rank in waiting.items() if end in ready]:
                results[rank], failure = self._answer(rank, rank in dying)
                if failure:
                    failures.append(f"rank {rank} {failure}")
                    deadline = min(deadline, time.monotonic() + GRACE)
            if not ready:
                failures += self._hanging(sorted(waiting.values()))
                break
        if failures:
            self.close(kill=True)
            failures.sort(key=lambda failure: " died " not in failure.splitlines()[0])
            first, *others = failures
            rest = "".join(f"\n\nand {brief(other)}" for other in others)
            raise RankFailure(f"{function.__qualname__} on {len(self._ends)} ranks: {first}{rest}")
        return [results[rank] for rank in range(len(self._ends))]

    def _answer(self, rank: int, dying: bool) -> tuple[Any, str]:
        try:
            done, value, broken = pickle.loads(self._ends[rank].recv_bytes())
        except (EOFError, OSError):
            code = self._processes[rank].join(GRACE)
            return Died(code), "" if dying else f"died (exit code {code})\n{self._tail(rank)}"
        self.broken |= broken
        if dying:
            return None, f"lives and returned {value!r}"
        return (value, "") if done else (None, f"raised\n{value}")

    def _hanging(self, ranks: list[int]) -> list[str]:
        """Have every rank that does not answer say where it is."""
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._processes[rank].pid, signal.SIGUSR1)
        time.sleep(0.5)
        return [f"rank {rank} hangs\n{self._tail(rank)}" for rank in ranks]

    def _log(self, rank: int) -> Path:
        return Path(self._logs.name) / f"rank{rank}.log"

    def _tail(self, rank: int, lines: int = 60) -> str:
        log = self._log(rank)
        text = log.read_text(errors="replace") if log.exists() else ""
        return "\n".join(text.splitlines()[-lines:])

    def close(self, *, kill: bool = False) -> None:
        for end in self._ends:
            end.close()  # a rank that waits for work ends now
        for process in self._processes:
            if process.join(0 if kill else GRACE) is None:
                process.kill()
                process.join(GRACE)
        self._store = None
        self._logs.cleanup()


def brief(failure: str, lines: int = 4) -> str:
    """The beginning and the end of what another rank said: it mostly follows from the first failure."""
    said = failure.splitlines()
    return "\n".join([*said[:lines], "...", *said[-lines:]] if len(said) > 2 * lines else said)


# -- on a rank -------------------------------------------------------------------------------------


def collectives() -> int:
    """How many collectives this rank has started, as its process groups count them, and announcements."""
    groups: Any = dist.distributed_c10d._world.pg_map
    announced = sum(own.announced for own in channel._living)
    return sum(group._get_sequence_number_for_group() for group in groups) + announced


# -- a rank ----------------------------------------------------------------------------------------


def serve(end: Connection, rank: int, world: int, port: int | None, log: str) -> None:
    """The life of a rank: run what is asked for until the other end closes."""
    write_to(log)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    torch.set_num_threads(1)
    gc.freeze()
    if "lo" in (name for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if port is not None:
        timeout = timedelta(seconds=PATIENCE)
        store = TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)
    while True:
        try:
            job = end.recv_bytes()
        except (EOFError, OSError):
            os._exit(0)  # no farewells: other ranks may be dead
        end.send_bytes(reply(job))
        gc.collect()


def reply(job: bytes) -> bytes:
    """The answer to a call, pickled, and whether other ranks have to take the place of these.

    An answer that cannot be pickled is a failure.
    """
    before = optimizers.forgotten
    done, value = answer(job)
    broken = any(own.broken for own in channel._living) or optimizers.forgotten > before
    try:
        return pickle.dumps((done, value, broken))
    except Exception as error:
        return pickle.dumps((False, f"{type(error).__name__}: {error}", broken))
