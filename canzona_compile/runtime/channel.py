"""What ranks tell one another on the host before they run collectives of data.

Collectives of different calls must never meet: one would get the data of another, or, if sizes differ, gloo ends the
process. So a rank *announces* what it is about to do with other ranks: which call, of which optimizer or model, with
which details, or the error that keeps it from that. An announcement is an all-reduce of two integers that carry a
digest, on a process group of our own. It has one size whatever it says, so announcements of ranks that went different
ways meet one another in order. If digests are equal, all ranks do the same and go on. Else they exchange the texts, and
all raise before any collective of data has begun.

There is one channel for each set of ranks in a process. All optimizers and models on these ranks share it, so that two
optimizers that are stepped in another order on some rank are found, too. An error on the way through a call *breaks*
the channel: collectives may wait for partners that never come, and nobody that shares it may go on. The store, a
key-value server, tells the others, who listen while they wait. Nothing else is bound on these ranks then, because
their process groups have collectives that never complete.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import os
import time
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from canzona_compile.compat.torch_private import AllreduceOptions, PrefixStore, default_store, host_group
from canzona_compile.errors import CanzonaError, RankMismatch
from canzona_compile.runtime.process_groups import own_name
from canzona_compile.runtime.waiter import Waiter

Ranks = tuple[int, ...]
ROLL_CALL = timedelta(seconds=3)  # how long ranks have to answer after a collective failed; they listen every second
ENDED = "look at the output of the ranks that do not answer: they ended or hang. Restart all ranks from a checkpoint"
AGAIN = "restart all ranks from a checkpoint, or at least recreate their process groups"


class Notice(NamedTuple):
    """What one rank announces.

    Attributes:
        doing: the call, and the optimizer or the model that it concerns.
        failure: the error that keeps the rank from the call; empty if none does.
        told: details that the caller compares.
    """

    doing: str
    failure: str
    told: str


class Announcement:
    """An announcement that was started.

    Args:
        channel: where.
        entry: what this rank announces.
        error: the error of this rank; None if it can go on.
    """

    def __init__(self, channel: Channel, entry: Notice, error: CanzonaError | None) -> None:
        self._channel, self._entry, self._error = channel, entry, error
        self._answers: list[str] = []
        text = json.dumps(entry)
        digest = int(hash_of(text)[:14], 16)
        self._values = torch.tensor([digest, -digest], device="cpu")
        self._work = channel.largest(self._values)
        self._finished = False

    @property
    def refused(self) -> bool:
        """Whether the answers are there, and are such that no rank goes on."""
        return self._finished and self._error is not None

    def finish(self) -> None:
        """Wait for the other ranks, and find out whether they do the same.

        Raises:
            CanzonaError: a rank died, or failed on its way through a call.
        """
        if self._finished:
            return
        channel = self._channel
        with channel.on_its_way():
            channel.watch.wait(self._work)
            largest, smallest = self._values.tolist()
            if largest == -smallest:
                self._answers = [self._entry.told] * len(channel.ranks)
            else:
                self._read(channel)
        self._finished = True

    def _read(self, channel: Channel) -> None:
        texts = channel.gather(json.dumps(self._entry))
        found = {rank: Notice(*json.loads(text)) for rank, text in zip(channel.ranks, texts, strict=True)}
        self._answers = [entry.told for entry in found.values()]
        if self._error is not None:
            return
        for rank, entry in found.items():
            if entry.failure:
                self._error = RankMismatch(f"rank {rank} cannot run this step:\n{entry.failure}")
                return
        if len({entry.doing for entry in found.values()}) > 1:
            said = "; ".join(f"rank {rank}: {entry.doing}" for rank, entry in found.items())
            self._error = RankMismatch(
                f"ranks made different calls, and nothing was changed ({said})",
                hint="make the same calls on all ranks, in the same order, for the same optimizers and models",
            )

    def result(self) -> list[str]:
        """Wait for the other ranks, and return what each of them told, in their order.

        Raises:
            CanzonaError: a rank cannot go on, or does something else. Every rank raises, and nothing has begun.
        """
        self.finish()
        if self._error is not None:
            self._channel.complete()  # a rank that announced something else may have done so already
            raise self._error
        return self._answers


class Channel:
    """Where a set of ranks announce what they are about to do. The constructor is a collective of these ranks.

    Args:
        ranks: the global ranks, ascending.
        timeout: how long an announcement waits for the other ranks.

    Attributes:
        group: a process group of the host, for announcements alone: the user's groups may be in use in other threads.
        announced: how often this rank announced something.
        store: holds keys of this channel alone.
        broken: why no rank can go on here; empty if all can.
        under_way: the models whose gradients are being reduced; the first one starts collectives. See `Reduction`.
        promised: completes collectives that ranks have agreed on, each of one model; see `complete`.
    """

    def __init__(self, ranks: Ranks, timeout: timedelta) -> None:
        self.ranks, self.rank = ranks, dist.get_rank()
        self.broken, self.announced = "", 0
        self.under_way: list[Any] = []
        self.promised: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self.watch = Waiter([self], torch.device("cpu"), ENDED, self._catch_up)
        self._users: Counter[str] = Counter()
        self._last: Announcement | None = None
        self._notes: set[tuple[int, str]] = set()  # what this rank noted, after how many announcements
        self.store = PrefixStore(own_name(ranks, "channels"), default_store())
        self.group = host_group(PrefixStore("gloo", self.store), ranks, self.rank, timeout)
        _living.add(self)

    def number(self, kind: str) -> int:
        """Count one more user of a kind. Ranks that make them in the same order give them the same number."""
        self._users[kind] += 1
        return self._users[kind] - 1

    def next_number(self, kind: str) -> int:
        """The number that the next user of a kind gets."""
        return self._users[kind]

    def largest(self, values: torch.Tensor) -> dist.Work:
        """Start to replace integers by their maxima over all ranks."""
        options = AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX  # type: ignore[assignment]
        work: dist.Work = self.group.allreduce([values], options)
        return work

    def gather(self, text: str) -> list[str]:
        """Gather a text without zero bytes from every rank. This is a collective."""
        data = torch.tensor(list(text.encode()), dtype=torch.uint8, device="cpu")
        length = torch.tensor([len(data)], device="cpu")
        self.watch.wait(self.largest(length))
        padded = torch.zeros(int(length), dtype=torch.uint8, device="cpu")
        padded[: len(data)] = data
        found = [torch.empty_like(padded) for _ in self.ranks]
        self.watch.wait(self.group.allgather([found], [padded]))
        return [bytes(own.tolist()).rstrip(b"\0").decode() for own in found]

    # -- announcements -------------------------------------------------------------------------------

    def start(self, doing: str, told: str = "", error: CanzonaError | None = None) -> Announcement:
        """Start to announce something. The caller has to ask for the result before it begins collectives.

        Args:
            doing: the call, and what it concerns.
            told: details that the caller compares.
            error: what keeps this rank from the call; None if nothing does.

        Raises:
            CanzonaError: the channel is broken.
        """
        self.check()
        if self._last is not None:
            self._last.finish()
        if self._notes:
            self._tell("raised", None)
        self._notes = {note for note in self._notes if note[0] == self.announced}  # no rank is later than this
        self.announced += 1
        self._last = Announcement(self, Notice(doing, str(error or ""), told), error)
        return self._last

    def exchange(self, doing: str, told: str = "", error: CanzonaError | None = None) -> list[str]:
        """Announce something and wait for all ranks; see `start` and `Announcement.result`."""
        return self.start(doing, told, error).result()

    def complete(self, apart_from: Any = None) -> None:
        """Complete the collectives that earlier announcements promised, so that no rank waits for them."""
        for gathering in list(self.promised):
            if gathering is not apart_from:
                gathering.wait()

    def tell_waiting(self, name: str, number: int) -> None:
        """Tell the others which promised collective this rank waits for.

        Args:
            name: of the model.
            number: how many of its collectives will be complete then; 0 if this rank no longer waits.
        """
        self._tell("waits", [self.announced, name, number] if number else None)

    def _catch_up(self) -> None:
        """Complete what another rank waits for that has not announced what this rank has.

        It cannot announce it before. On ranks that make the same calls this does not happen, and no collective may
        start because time has passed: others may be on their way to another one.
        """
        for announced, name, number in self._told("waits"):
            for gathering, own in list(self.promised.items()):
                if own == name and announced < self.announced:
                    gathering.catch_up(number)

    # -- errors --------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise if an earlier call ended on its way.

        Raises:
            CanzonaError: its collectives may still wait for partners, and would get the data of this call.
        """
        if self.broken:
            raise CanzonaError(
                f"an earlier step failed midway, so ranks may hold parameters of different steps: {self.broken}",
                hint=AGAIN,
            )

    @contextlib.contextmanager
    def on_its_way(self) -> Iterator[None]:
        """Inside this context ranks communicate. Any error, an interrupt too, breaks the channel for all of them."""
        try:
            yield
        except BaseException as error:
            self.interrupt(error)
            raise

    def interrupt(self, error: BaseException) -> None:
        """Break the channel because of an error of this rank, and tell the others."""
        if self.broken:  # the others know
            return
        text = (str(error).strip() or type(error).__name__).splitlines()[0]
        problem = f"the step failed on rank {self.rank}: {type(error).__name__}: {text}"
        self.fail(CanzonaError(problem, at=getattr(error, "at", None), hint=getattr(error, "hint", None)))

    def fail(self, error: CanzonaError) -> None:
        """Break the channel, and tell the others. The first error that is told stays."""
        self.broken = self.broken or error.problem.splitlines()[0]
        with contextlib.suppress(RuntimeError):  # the store may have died with its host
            self.store.compare_set("broken", "", str(error))

    def note(self, error: CanzonaError) -> None:
        """Tell ranks of an error that changed nothing, if they wait for what this one announces next."""
        note = (self.announced, str(error))
        self._notes.add(note)
        self._tell("raised", note)

    def _tell(self, what: str, told: Any) -> None:
        """Keep what this rank tells where the others can find it; None takes it back.

        Nothing is deleted, because a rank that asked whether there is something would wait for it.
        """
        with contextlib.suppress(RuntimeError):  # the store may have died with its host
            self.store.set(f"{what}/{self.rank}", json.dumps(told))

    def _told(self, what: str) -> list[Any]:
        """What the other ranks tell at present."""
        keys = [f"{what}/{rank}" for rank in self.ranks if rank != self.rank]
        told = [json.loads(self.store.get(key)) for key in keys if self.store.check([key])]
        return [own for own in told if own is not None]

    def listen(self) -> None:
        """Hear, while this rank waits, whether another one failed.

        Raises:
            CanzonaError: a rank failed. The channel is broken.
        """
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
        store = self.store
        if store.check(["roll"]):
            store.set(f"here/{self.rank}", "1")
        broken: str = store.get("broken").decode() if store.check(["broken"]) else ""
        if broken:
            return broken
        for announced, text in self._told("raised"):
            # A rank that raised what this one did goes on as this one does.
            if announced < self.announced and (announced, text) not in self._notes:
                return str(text)
        return ""

    def absent(self) -> list[int]:
        """After a collective failed, find the ranks that do not answer: they have ended, or hang."""
        store, others = self.store, [rank for rank in self.ranks if rank != self.rank]
        try:
            store.set(f"here/{self.rank}", "1")
            store.set("roll", "1")
            deadline = time.monotonic() + ROLL_CALL.total_seconds()
            while others and time.monotonic() < deadline:
                others = [rank for rank in others if not store.check([f"here/{rank}"])]
                time.sleep(0.02)
        except RuntimeError:  # the store died with its host
            return []
        return others


@atexit.register
def close_all() -> None:
    """End the threads of all channels before the interpreter ends; users may still hold optimizers."""
    for channel in list(_living):
        channel.group = channel._last = None


_living: weakref.WeakSet[Channel] = weakref.WeakSet()
os.register_at_fork(after_in_child=_living.clear)  # the threads of these groups are not in the child
_channels: weakref.WeakKeyDictionary[Any, dict[Ranks, Channel]] = weakref.WeakKeyDictionary()


def channel_of(ranks: Sequence[int], timeout: timedelta) -> Channel:
    """Return the channel of some ranks. If it is new, this is a collective of theirs.

    Channels end with the default process group.

    Args:
        ranks: the global ranks.
        timeout: how long announcements wait for other ranks, if the channel is new.

    Raises:
        CanzonaError: the channel is broken. Process groups of these ranks have collectives that never complete.
    """
    world: Any = dist.group.WORLD
    known = _channels.setdefault(world, {})
    key = tuple(sorted(ranks))
    if key in known:
        known[key].listen()
        known[key].check()
    else:
        known[key] = Channel(key, timeout)
    return known[key]


def hash_of(text: str) -> str:
    """The SHA-256 of a text, in hexadecimal digits."""
    return hashlib.sha256(text.encode()).hexdigest()
