"""The process that ranks are forked from. What it has done (captured, computed, imported) no rank does again.

A capture takes a second and more, and tests of layouts need the same ones on every rank of every pool. Here one
process makes them, without process groups; ranks inherit its memory.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from multiprocessing import forkserver, reduction
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess, ForkServerContext
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
PRELOAD = (
    "pytest",
    "torch",
    "torch._dynamo",
    "torch._inductor.cudagraph_trees",  # the first capture in a process imports it, which takes seconds
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "canzona_compile.api.zero1",  # a step's modules, which the package imports when they are used: half a second
    "canzona_compile.session.session",
    "tests.harness.layouts",
)
LIMIT = 300.0  # seconds that a call may take; only a hang takes so long


def call_of(function: Callable[..., Any], *args: Any, **kwargs: Any) -> bytes:
    """A call for another process. The function is named by its module: it has to be importable."""
    return pickle.dumps((function.__module__, function.__qualname__, args, kwargs))


def answer(call: bytes) -> tuple[bool, Any]:
    """Make a call of `call_of`: whether it went well, and what it returned, or the traceback."""
    try:
        module, name, args, kwargs = pickle.loads(call)
        function: Any = importlib.import_module(module)
        for part in name.split("."):
            function = getattr(function, part)
        return True, function(*args, **kwargs)
    except BaseException:
        return False, traceback.format_exc()


class Nursery:
    """One process that makes calls and forks."""

    def __init__(self) -> None:
        context = server()
        self.done: frozenset[bytes] = frozenset()
        self._folder = tempfile.TemporaryDirectory(prefix="canzona-nursery-")
        self._log = Path(self._folder.name) / "log"
        self._end, theirs = context.Pipe()
        self._process = context.Process(target=live, args=(theirs, str(self._log)))
        self._process.start()
        theirs.close()

    def do(self, call: bytes, strictly: bool = False) -> None:
        """Make a call there, unless it was made before. Ranks that are forked afterwards have it behind them.

        Args:
            strictly: warnings are errors, as they are in tests.
        """
        if call in self.done:
            return
        well, said = self._ask("do", call, strictly)
        if not well:
            raise AssertionError(f"before any rank was forked, {pickle.loads(call)[1]} raised\n{said}")
        self.done |= {call}

    def fork(self, end: Connection, function: Callable[..., None], *args: Any) -> Child:
        """A process that runs `function(end, *args)`."""
        self._send("fork", function, args)
        reduction.send_handle(self._end, end.fileno(), self._process.pid)
        return Child(self, self._receive())

    def _ask(self, *request: Any) -> Any:
        self._send(*request)
        return self._receive()

    def _send(self, *request: Any) -> None:
        with contextlib.suppress(OSError):  # it is dead, as `_receive` finds
            self._end.send(request)

    def _receive(self) -> Any:
        try:
            if self._end.poll(LIMIT):
                return self._end.recv()
            said = "hangs"
        except (EOFError, OSError):
            said = "died"
        nursery.cache_clear()
        self.close()
        raise AssertionError(f"the process that ranks are forked from {said}\n{self._log.read_text(errors='replace')}")

    @property
    def closed(self) -> bool:
        return self._end.closed

    def close(self) -> None:
        self._end.close()
        self._process.join(1)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


class Child:
    """A process that the nursery forked."""

    def __init__(self, parent: Nursery, pid: int) -> None:
        self.pid, self._parent = pid, parent

    def join(self, timeout: float) -> int | None:
        """Wait until it ends: its exit code; None if it has not ended in time."""
        code: int | None = None if self._parent.closed else self._parent._ask("join", self.pid, timeout)
        return code

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


@functools.cache
def nursery() -> Nursery:
    """That of this test process."""
    return Nursery()


# -- in the process itself -------------------------------------------------------------------------


def live(end: Connection, log: str) -> None:
    """The life of the nursery: do what it is asked for until the other end closes.

    It must have one thread: what it forks has no others.
    """
    from tests.harness.optimizers import (  # late, see tests/conftest.py
        keep_what_is_shared,
        leave_guards_unmeasured,
        leave_rates_assumed,
        plans_share_captures,
    )

    write_to(log)
    torch.set_num_threads(1)
    leave_guards_unmeasured()
    leave_rates_assumed()
    keep_what_is_shared()
    plans_share_captures().start()
    if not torch.accelerator.is_available():
        # The first backward decides how many threads autograd has. A later one could find a device: in a build for
        # CUDA, the first fake tensor on such a device makes torch say that there is one.
        torch.ones((), requires_grad=True).backward()
    children: dict[int, ForkProcess] = {}
    while True:
        try:
            kind, *request = end.recv()
        except (EOFError, OSError):
            os._exit(0)
        match kind:
            case "do":
                call, strictly = request
                with warnings.catch_warnings():
                    if strictly:
                        warnings.simplefilter("error")
                        for known in ("`torch.jit", "Conversion of an array with ndim"):  # as in tests/conftest.py
                            warnings.filterwarnings("ignore", known, DeprecationWarning)
                    well, said = answer(call)
                end.send((well, None if well else said))
                gc.collect()
                gc.freeze()  # so that ranks need not copy what they never change
            case "fork":
                own = Connection(reduction.recv_handle(end))
                function, args = request
                process = multiprocessing.get_context("fork").Process(target=function, args=(own, *args))
                process.start()
                own.close()
                assert process.pid is not None
                children[process.pid] = process
                end.send(process.pid)
            case "join":
                pid, timeout = request
                children[pid].join(timeout)
                end.send(children[pid].exitcode)


def write_to(log: str) -> None:
    """Send what this process prints to a file."""
    with open(log, "w") as file:
        for standard in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), standard.fileno())


# -- where it comes from ---------------------------------------------------------------------------


@functools.cache
def server() -> ForkServerContext:
    """The context of a fork server that has imported what ranks need."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    one = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "MKL", "OPENBLAS")}
    with environment(PYTHONPATH=os.pathsep.join(paths), **one):
        forkserver.ensure_running()
    return context


@contextlib.contextmanager
def environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
