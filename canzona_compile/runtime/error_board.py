"""What ranks tell one another of errors, through the store: a key-value server that all of them ask while they wait.

An error on the way through a call *breaks* the board: collectives may wait for partners that never come, and nobody
that shares it may go on. An error that changed nothing is *noted* for ranks that wait for the next call of this one.
One key of the store says whether there is news. Once a collective failed, a roll call finds out who does not answer.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from canzona_compile.compat.torch_private import Store
from canzona_compile.errors import CanzonaError, RankMismatch
from canzona_compile.ir.layout import Ranks

ROLL_CALL = timedelta(seconds=3)  # how long ranks have to answer after a collective failed; they listen every second
WORD = 60  # bits of an integer of the store that tell who has come
AGAIN = "restart all ranks from a checkpoint, or at least recreate their process groups"


class Attendance:
    """Who of some global ranks has come: a count, and a bit for each of them."""

    def __init__(self, store: Store, key: str, ranks: Ranks, rank: int) -> None:
        self._store, self._ranks, self._place = store, ranks, ranks.index(rank)
        self._words = [f"{key}/{i}" for i in range(0, len(ranks), WORD)]
        self._count, self._came = f"{key}/count", False
        self.keys = [*self._words, self._count]

    def come(self) -> bool:
        """Say that this rank has come. Return whether it is the last one."""
        if self._came:
            return False
        self._came = True
        self._store.add(self._words[self._place // WORD], 1 << self._place % WORD)
        return int(self._store.add(self._count, 1)) == len(self._ranks)

    @property
    def complete(self) -> bool:
        """Whether all have come."""
        return int(self._store.add(self._count, 0)) == len(self._ranks)

    def missing(self) -> list[int]:
        """The ranks that have not come."""
        words = [int(self._store.add(word, 0)) for word in self._words]
        return [rank for i, rank in enumerate(self._ranks) if not words[i // WORD] >> i % WORD & 1]


class ErrorBoard:
    """Where some ranks tell one another of errors.

    Attributes:
        broken: the error after which none of them begins a call any more; empty if there was none.
        announced: how many calls this rank has announced.
    """

    def __init__(self, ranks: Ranks, rank: int, store: Store) -> None:
        self.ranks, self.rank, self.store = ranks, rank, store
        self.broken, self.announced = "", 0
        self._notes: set[tuple[int, str]] = set()  # what this rank noted, after how many announcements
        self._noted: dict[int, Any] = {}  # what the others noted, by rank
        self._heard_of = 0  # how many notes this rank has read
        self._read: int = store.add("news", 0)  # how many news this rank has read
        self._roll = Attendance(store, "here", ranks, rank)

    def kept(self, key: str) -> str:
        """What the store holds at a key; empty if nothing."""
        return self.store.get(key).decode() if self.store.check([key]) else ""

    # -- what this rank tells ------------------------------------------------------------------------

    def check(self) -> None:
        """Raise if an earlier call ended on its way."""
        if self.broken:
            raise CanzonaError(
                f"an earlier step failed midway, so ranks may hold parameters of different steps: {self.broken}",
                hint=AGAIN,
            )

    def count_call(self) -> None:
        """Count one more call that this rank announces: no rank waits for the one before any more."""
        if self._notes:
            self._tell_note(None)
        self._notes = {note for note in self._notes if note[0] == self.announced}  # no rank is later than this
        self.announced += 1

    @contextlib.contextmanager
    def on_its_way(self) -> Iterator[None]:
        """Inside this context ranks communicate. Any error, an interrupt too, breaks the board for all of them."""
        try:
            yield
        except BaseException as error:
            self.interrupt(error)
            raise

    def interrupt(self, error: BaseException) -> None:
        """Break the board because of an error of this rank, and tell the others."""
        if self.broken:  # the others know
            return
        text = (str(error).strip() or type(error).__name__).splitlines()[0]
        problem = f"the step failed on rank {self.rank}: {type(error).__name__}: {text}"
        self.fail(CanzonaError(problem, at=getattr(error, "at", None), hint=getattr(error, "hint", None)))

    def fail(self, error: CanzonaError) -> None:
        """Break the board, and tell the others. The first error that is told stays."""
        self.broken = self.broken or error.problem.splitlines()[0]
        with contextlib.suppress(RuntimeError):  # the store may have died with its host
            self.store.compare_set("broken", "", str(error))
            self.store.add("news", 1)

    def note(self, error: CanzonaError) -> None:
        """Tell ranks of an error that changed nothing, if they wait for what this one announces next."""
        note = (self.announced, str(error))
        self._notes.add(note)
        self._tell_note(note)

    def _tell_note(self, note: tuple[int, str] | None) -> None:
        """Keep what this rank notes where the others can find it; None takes it back."""
        with contextlib.suppress(RuntimeError):  # the store may have died with its host
            self.store.set(f"raised/{self.store.add('raised', 1)}", json.dumps([self.rank, note]))
            self.store.add("news", 1)

    # -- what it hears -------------------------------------------------------------------------------

    def listen(self) -> None:
        """Hear, while this rank waits, whether another one failed."""
        try:
            text = self._heard()
        except RuntimeError as error:
            text = str(
                CanzonaError(f"cannot reach the store of the process group; the rank that hosts it has ended: {error}")
            )
        if text:
            failure = RankMismatch(text)
            self.broken = self.broken or failure.problem.splitlines()[0]
            raise failure

    def _heard(self) -> str:
        """What another rank has told of an error; empty if none has."""
        news: int = self.store.add("news", 0)
        if news > self._read:
            if self.store.check(["roll"]):
                self._roll.come()
            if broken := self.kept("broken"):
                return broken
            while text := self.kept(f"raised/{self._heard_of + 1}"):
                rank, note = json.loads(text)
                self._noted[rank] = note if rank != self.rank else None
                self._heard_of += 1
            self._read = news
        for announced, text in filter(None, self._noted.values()):
            # A rank that raised what this one did goes on as this one does.
            if announced < self.announced and (announced, text) not in self._notes:
                return str(text)
        return ""

    def absent(self) -> list[int]:
        """After a collective failed, find the ranks that do not answer: they have ended, or hang."""
        try:
            self._roll.come()
            self.store.set("roll", "1")
            self.store.add("news", 1)
            deadline = time.monotonic() + ROLL_CALL.total_seconds()
            while not self._roll.complete and time.monotonic() < deadline:
                time.sleep(pause_of(self.ranks))
            return self._roll.missing()
        except RuntimeError:  # the store died with its host
            return []


def pause_of(ranks: Ranks) -> float:
    """For how many seconds a rank of these waits before it asks the store again, which answers all of them."""
    return max(0.02, 1e-4 * len(ranks))
