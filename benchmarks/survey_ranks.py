"""Ranks that work on one optimizer after the other, and that are replaced when one of them hangs or dies."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

GRACE = 10.0  # seconds that the other ranks have to answer once one has


class Stuck(Exception):
    """Some rank has hung, died or raised; the message is the last line of what it said."""


class Ranks:
    """Processes of one thread with a process group of gloo. They are forked from a server that has imported torch."""

    def __init__(self, world: int, limit: float) -> None:
        self._world, self._limit = world, limit
        self._context = get_context("forkserver")
        self._context.set_forkserver_preload(["torch", "torch._dynamo", "canzona_compile", "survey_trial"])
        self._ends: list[Connection] = []
        self._processes: list[Any] = []
        self._store: Any = None
        self._logs = tempfile.TemporaryDirectory(prefix="canzona-survey-")

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """`function(*args)` on every rank; what it returned, by rank.

        Raises:
            Stuck: on some rank it did not come to an end. The next call gets new ranks.
        """
        if not self._processes:
            self._start()
        for end in self._ends:
            end.send((function, args))
        results: dict[int, Any] = {}
        deadline = time.monotonic() + self._limit
        while len(results) < self._world:
            waiting = {end: rank for rank, end in enumerate(self._ends) if rank not in results}
            ready = connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                raise Stuck(self._where(sorted(waiting.values()), results))
            for end in [end for end in waiting if end in ready]:
                results[waiting[end]] = self._answer(end, waiting[end])
            deadline = min(deadline, time.monotonic() + GRACE)
        return [results[rank] for rank in range(self._world)]

    def _answer(self, end: Connection, rank: int) -> Any:
        try:
            done, value = pickle.loads(end.recv_bytes())
        except (EOFError, OSError):
            said = self._said(rank)
            self.close()
            raise Stuck(f"rank {rank} died: {said[-1] if said else ''}") from None
        if not done:
            self.close()
            raise Stuck(value.strip().splitlines()[-1])
        return value

    def _where(self, waiting: list[int], results: dict[int, Any]) -> str:
        """Have the ranks that hang say where they are, then end all."""
        for rank in waiting:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._processes[rank].pid, signal.SIGUSR1)
        time.sleep(0.5)
        said = self._said(waiting[0])
        tops = [said[i + 1].strip() for i, line in enumerate(said[:-1]) if line.startswith("Current thread")]
        self.close()
        others = f"; another says {str(next(iter(results.values())))[:400]}" if results else ""
        return f"rank {waiting[0]} hangs: {tops[-1] if tops else 'nowhere known'}{others}"

    def _said(self, rank: int) -> list[str]:
        log = Path(self._logs.name, f"rank{rank}")
        return log.read_text(errors="replace").strip().splitlines() if log.exists() else []

    def _start(self) -> None:
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(self._world):
            mine, theirs = self._context.Pipe()
            log = str(Path(self._logs.name, f"rank{rank}"))
            process = self._context.Process(
                target=serve, args=(theirs, rank, self._world, self._store.port, self._limit, log), daemon=True
            )
            process.start()
            theirs.close()
            self._ends.append(mine)
            self._processes.append(process)

    def close(self) -> None:
        """End the processes; they may hang, so they are not asked."""
        for end in self._ends:
            end.close()
        for process in self._processes:
            process.kill()
            process.join()
        self._ends, self._processes, self._store = [], [], None


def serve(end: Connection, rank: int, world: int, port: int, limit: float, log: str) -> None:
    """The life of a rank: run what is asked for until the other end closes."""
    with open(log, "w") as file:
        for standard in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), standard.fileno())
    faulthandler.register(signal.SIGUSR1)
    torch.set_num_threads(1)
    if "lo" in (name for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a host's own name need not resolve
    patience = timedelta(seconds=limit)
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=patience)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=patience)
    while True:
        try:
            function, args = end.recv()
        except (EOFError, OSError):
            os._exit(0)  # no farewells: other ranks may be dead
        end.send_bytes(answer(function, args))


def answer(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    try:
        return pickle.dumps((True, function(*args)))
    except BaseException:
        return pickle.dumps((False, traceback.format_exc()))
