"""Meetings of ranks: each waits through the store, for a while, until all of them have come.

A call that only some ranks make, such as `if rank == 0: optimizer.state_dict()`, must not begin collectives: they would
wait for partners that never come, and the next collective of those partners would get their data. So the ranks meet
first. A meeting ends with one verdict for all: the first one that a rank writes, and the store compares and sets it at
once. "met" means that all came, and all go on; the last one to come writes it, with what ranks came for if that
differs. Any other verdict names the ranks that were missing; those that waited raise. A rank that comes after that
verdict goes to the next meeting, so ranks that missed different meetings find each other again.

The store is one server for all ranks of a job. So each rank asks for a number of keys that does not grow with theirs,
and one of them, the last, reads what all came for.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import NamedTuple

from canzona_compile.compat.torch_private import Store
from canzona_compile.errors import CanzonaError, RankMismatch
from canzona_compile.ir.layout import Ranks
from canzona_compile.runtime.error_board import Attendance, ErrorBoard, pause_of

PATIENCE = timedelta(seconds=30)  # how long a rank waits for the others, which may be writing weights meanwhile
MET = "met"


class Purpose(NamedTuple):
    """What a meeting is for, for messages."""

    call: str
    why: str
    hint: str


class Meeting:
    """The meetings of the ranks that share a board, one after the other; who waits hears of errors there."""

    def __init__(self, store: Store, board: ErrorBoard) -> None:
        self.store, self.ranks, self.rank, self._board = store, board.ranks, board.rank, board
        self._index = 0  # the number of the next meeting
        self._since = 0  # the number of the first meeting whose verdict may still be in the store

    def arrive(self, intent: str) -> None:
        """Tell the others that this rank has come, and what for, which is not empty."""
        while self._verdict():
            self._index += 1
        self.store.set(self._key(self.rank), intent)
        self._came = self._attendance(self._index)
        if self._came.come():
            self._vote(self._met())

    def wait(self, intent: str, purpose: Purpose) -> None:
        """After `arrive`, wait until all members have come, and compare what they came for."""
        try:
            verdict = self._await(intent)
        except BaseException:  # an interrupt, too: the others must not take this rank for one that goes on
            self.withdraw()
            raise
        met, _, said = verdict.partition("\n")
        if met == MET:
            self._leave()
            if said:
                raise RankMismatch(
                    f"ranks made different calls, or their state differs ({said})",
                    hint="make the same calls on all ranks, in the same order",
                )
            return
        self._index += 1
        seconds = PATIENCE.total_seconds()
        raise CanzonaError(
            f"{purpose.call} needs the ranks {list(self.ranks)}, {purpose.why}; "
            f"rank {verdict} did not make this call within {seconds:g} s",
            hint=purpose.hint,
        )

    def withdraw(self) -> None:
        """Give up a meeting that this rank has come to."""
        with contextlib.suppress(RuntimeError):  # the store may have died with its host
            if self._vote(str(self.rank)).startswith(MET):  # the others go on, and read what this rank came for
                self._leave()
                return
        self._index += 1

    def _await(self, intent: str) -> str:
        """Wait for the verdict of a meeting that this rank has come to."""
        deadline, pause = time.monotonic() + PATIENCE.total_seconds(), 0.0005
        while True:
            self._board.listen()
            verdict = self._verdict()
            if str(self.rank) in verdict.split(", ") and not verdict.startswith(MET):
                self.arrive(intent)  # the others gave up just before this rank came
                return self._await(intent)
            if verdict:
                return verdict
            if time.monotonic() > deadline:
                self._vote(", ".join(map(str, self._came.missing())) or self._met())
            else:
                time.sleep(pause)
                pause = min(2 * pause, pause_of(self.ranks))

    def _met(self) -> str:
        """The verdict of a meeting to which all came, with what they came for if that differs."""
        found = {r: self.store.get(self._key(r)).decode() for r in self.ranks}
        said = "; ".join(f"rank {r}: {text.splitlines()[0]}" for r, text in found.items())
        return MET if len(set(found.values())) == 1 else f"{MET}\n{said}"

    def _attendance(self, index: int) -> Attendance:
        return Attendance(self.store, f"{index}/came", self.ranks, self.rank)

    def _verdict(self) -> str:
        """The verdict of the current meeting; empty if it is open."""
        key = self._key("verdict")
        return self.store.get(key).decode() if self.store.check([key]) else ""

    def _vote(self, verdict: str) -> str:
        """Write the verdict, unless there is one, and return the one that holds."""
        held: bytes = self.store.compare_set(self._key("verdict"), "", verdict)
        return held.decode()

    def _leave(self) -> None:
        """Leave a meeting to which all came. The last one deletes its keys and those of earlier ones."""
        if self.store.add(self._key("left"), 1) == len(self.ranks):
            for index in range(self._since, self._index + 1):
                names = [*self.ranks, "left", "verdict"]
                for key in [*self._attendance(index).keys, *(f"{index}/{name}" for name in names)]:
                    self.store.delete_key(key)
        self._index += 1
        self._since = self._index

    def _key(self, name: int | str) -> str:
        return f"{self._index}/{name}"


def meet_all(intents: Mapping[Ranks, str], meeting_of: Callable[[Ranks], Meeting], purpose: Purpose) -> None:
    """Wait until all ranks have come that a call needs, before it begins collectives.

    `intents` has a text per set of ranks: what this rank means to do with them.
    """
    # A set within another one of this rank lies within it on all of its ranks: they meet in the larger one.
    sets = [ranks for ranks in sorted(intents) if not any(set(ranks) < set(other) for other in intents)]
    waiting = [(meeting_of(r), f"{purpose.call}\n{hashlib.sha256(intents[r].encode()).hexdigest()}") for r in sets]
    try:
        for meeting, own in waiting:
            meeting.arrive(own)
        while waiting:
            meeting, own = waiting.pop(0)
            meeting.wait(own, purpose)
    except BaseException as error:
        for meeting, _ in waiting:
            meeting.withdraw()
        if isinstance(error, RuntimeError) and not isinstance(error, CanzonaError):
            raise CanzonaError(
                f"ranks cannot synchronize, because the store of the process group is gone: {error}"
            ) from error
        raise
