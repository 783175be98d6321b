"""A rank in a process of its own, which can be asked where it hangs and be ended whatever it does."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import signal
import socket
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from canzona_compile.compat.torch_private import PrefixStore, TCPStore
from canzona_compile.errors import CanzonaError
from canzona_compile.tools.acceptance.step import AcceptanceRank, OnRanks
from canzona_compile.tools.processes import leave_no_locks

START_METHOD = "spawn"  # a forked process could not use CUDA
LAST_WORDS = 10.0  # seconds that a process has to write its stacks
PAUSE = 0.2  # seconds after which it has written all of them, if nothing more came
TAIL = 120  # lines of a log
AnswerKind = Literal["ready", "passed", "failed"]


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Which rank a process is, and where it meets the others.

    Attributes:
        rank, world: in the process group.
        local, near: the same among the ranks of this machine.
        device: "cuda" or "cpu".
        tiny: whether matrices are to be as small as they can be.
        host, port: of the store.
        meeting: the name under which these processes meet in the store; others take another one.
        patience: seconds of the process group's timeout.
        variables: of the environment.
    """

    rank: int
    world: int
    local: int
    near: int
    device: str
    tiny: bool
    host: str
    port: int
    meeting: str
    patience: float
    variables: tuple[tuple[str, str], ...]


class RankProcess:
    """The caller's side of one rank.

    Args:
        place: of the rank.
        log: the file to which it writes.
    """

    def __init__(self, place: RankPlace, log: Path) -> None:
        self.place, self.log = place, log
        context = multiprocessing.get_context(START_METHOD)
        self.end, theirs = context.Pipe()
        self._process: Any = context.Process(  # type: ignore[attr-defined]
            target=serve, args=(theirs, place, str(log)), name=f"rank {place.rank}", daemon=True
        )
        self._process.start()
        theirs.close()

    def begin(self, work: OnRanks, limit: float) -> None:
        """Have it start on some work."""
        with contextlib.suppress(OSError):  # its death is found by who waits for the answer
            self.end.send((work, limit))

    def answer(self) -> tuple[AnswerKind, str, str] | None:
        """What it has answered: kind, words and traceback; None if it is dead. There has to be something to read."""
        try:
            found: tuple[AnswerKind, str, str] = self.end.recv()
        except (EOFError, OSError):
            return None
        return found

    def exit_code(self) -> int | None:
        """The exit code of a process that has ended, or None."""
        self._process.join(5.0)
        code: int | None = self._process.exitcode
        return code

    def stacks(self) -> str:
        """Where each of its threads is, by the end of its log. Its C code may be waiting for the device."""
        with contextlib.suppress(ProcessLookupError, TypeError):
            before = seen = self._written()
            os.kill(self._process.pid, signal.SIGUSR1)
            deadline = time.monotonic() + LAST_WORDS
            while time.monotonic() < deadline:
                time.sleep(PAUSE)
                now = self._written()
                if now == seen and now > before:
                    break
                seen = now
        return self.tail()

    def _written(self) -> int:
        return self.log.stat().st_size if self.log.exists() else 0

    def tail(self) -> str:
        """The last lines that it wrote."""
        text = self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""
        return "\n".join(text.splitlines()[-TAIL:])

    def close(self) -> None:
        """End it, whatever it does."""
        self.end.close()
        self._process.kill()
        self._process.join()


# -- in the process --------------------------------------------------------------------------------


def serve(end: Connection, place: RankPlace, log: str) -> None:
    """The life of a rank: join the process group, then do what is asked for until the other end closes."""
    with open(log, "w", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    faulthandler.enable()
    # By the C signal handler: also of a thread that waits for a device or for a peer.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    # The package under test and this one read these; of a launcher's own they may be something else.
    own = {"RANK": place.rank, "WORLD_SIZE": place.world, "LOCAL_RANK": place.local, "LOCAL_WORLD_SIZE": place.near}
    os.environ.update({name: str(value) for name, value in own.items()} | dict(place.variables))
    leave_no_locks()
    torch.set_num_threads(1)  # exactness is promised for equally many threads
    try:
        here = joined(place)
    except BaseException as error:
        end.send(("failed", f"could not join the process group: {brief(error)}", traceback.format_exc()))
        os._exit(1)
    end.send(("ready", "", ""))
    while True:
        try:
            work, limit = end.recv()
        except (EOFError, OSError):
            os._exit(0)  # no farewells: other ranks may hang
        # Who started this process ends it earlier, unless that has died itself.
        faulthandler.dump_traceback_later(2 * limit + 60, exit=True)
        found = reply(work, here)
        faulthandler.cancel_dump_traceback_later()
        end.send(found)


def joined(place: RankPlace) -> AcceptanceRank:
    """Make this process a rank, with a device of its own."""
    device = torch.device("cpu")
    if place.device == "cuda":
        device = torch.device("cuda", place.local % torch.cuda.device_count())
        torch.cuda.set_device(device)
    elif "lo" in (name for _, name in socket.if_nameindex()) and place.near == place.world:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a host's own name need not resolve
    timeout = timedelta(seconds=place.patience)
    store = TCPStore(place.host, place.port, is_master=False, timeout=timeout)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=PrefixStore(place.meeting, store),
        rank=place.rank,
        world_size=place.world,
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )
    return AcceptanceRank(place.rank, place.world, device, place.tiny)


def reply(work: OnRanks, here: AcceptanceRank) -> tuple[AnswerKind, str, str]:
    """Do some work; its answer."""
    try:
        said = work.function(here, *work.args)
        if here.device.type == "cuda":
            torch.cuda.synchronize(here.device)  # errors of kernels show here at the latest
    except BaseException as error:
        return "failed", brief(error), traceback.format_exc()
    gc.collect()  # optimizers hold one another, and recordings their memory
    if here.device.type == "cuda":
        torch.cuda.empty_cache()
    return "passed", said, ""


def brief(error: BaseException) -> str:
    """An error in words; our own errors say enough without their class."""
    return str(error) if isinstance(error, CanzonaError) else f"{type(error).__name__}: {error}"
