"""What ranks tell one another on the host before they run collectives of data.

Collectives of different calls must never meet: one would get the data of another, or, if sizes differ, gloo ends the
process. So a rank *announces* what it is about to do with other ranks: which call, of which optimizer or model, with
which details, or the error that keeps it from that. An announcement is an all-reduce of two integers that carry a
digest, on a process group of our own. It has one size whatever it says, so announcements of ranks that went different
ways meet one another in order. If digests are equal, all ranks do the same and go on. Else they exchange the texts, and
all raise before any collective of data has begun. Gloo's all-reduce is a ring, 2 (n - 1) messages one after the other.
From `MANY` ranks on, each row of a rectangle of ranks reduces, and then each column: about 4 sqrt(n) messages, if
n has a divisor near its root. A rank then waits for all others where it starts an announcement.

There is one channel for each set of ranks in a process. All optimizers and models on these ranks share it, so that two
optimizers that are stepped in another order on some rank are found, too. So is what they tell one another of errors,
see `error_board`. Nothing is bound on these ranks once one of them failed on the way through a call, because their
process groups have collectives that never complete.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import math
import os
import weakref
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from canzona_compile.compat.torch_private import AllreduceOptions, PrefixStore, default_store, host_group
from canzona_compile.errors import CanzonaError, RankMismatch
from canzona_compile.ir.layout import Ranks
from canzona_compile.runtime.error_board import ErrorBoard
from canzona_compile.runtime.process_groups import own_name, timeout_of
from canzona_compile.runtime.waiter import Waiter

MANY = 64  # ranks, see benchmarks/agreement.py
ENDED = "look at the output of the ranks that do not answer: they ended or hang. Restart all ranks from a checkpoint"


class Notice(NamedTuple):
    """What one rank announces.

    Attributes:
        doing: the call, and the optimizer or the model that it concerns.
        failure: the error that keeps the rank from the call; empty if none does.
        details: what ranks compare of the call.
    """

    doing: str
    failure: str
    details: str


class Promise(Protocol):
    """Collectives that ranks have agreed on and that have not begun."""

    def wait(self) -> None:
        """Complete them."""

    def catch_up(self) -> None:
        """While this rank waits: complete what another one needs before it can announce what this one has."""


class Announcement:
    """An announcement that was started, with the error of this rank, if there is one."""

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
        """Wait for the other ranks, and find out whether they do the same."""
        if self._finished:
            return
        channel = self._channel
        with channel.on_its_way():
            channel.wait(self._work)
            for stage in range(1, len(channel.groups)):
                channel.wait(channel.largest(self._values, stage))
            largest, smallest = self._values.tolist()
            if largest == -smallest:
                self._answers = [self._entry.details] * len(channel.ranks)
            else:
                self._read(channel)
        self._finished = True

    def _read(self, channel: Channel) -> None:
        texts = channel.gather(json.dumps(self._entry))
        found = {rank: Notice(*json.loads(text)) for rank, text in zip(channel.ranks, texts, strict=True)}
        self._answers = [entry.details for entry in found.values()]
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
        """Wait for the other ranks, and return what each of them announced, in their order."""
        self.finish()
        if self._error is not None:
            self._channel.complete()  # a rank that announced something else may have done so already
            raise self._error
        return self._answers


class Channel(ErrorBoard):
    """Where a set of ranks announce what they are about to do. The constructor is a collective of these ranks.

    Attributes:
        groups: process groups of the host, for announcements alone: the user's groups may be in use in other threads.
            What all of them reduce, one after the other, is reduced over all ranks.
        users: how many optimizers or models of a kind have taken a number. Ranks that make them in the same order give
            them the same ones.
        under_way: who runs collectives of data on these ranks; the first one may start some.
        promised: those of which ranks have agreed that they complete collectives later, in their order; the values mean
            nothing.
    """

    def __init__(self, ranks: Ranks, timeout: timedelta) -> None:
        super().__init__(ranks, dist.get_rank(), PrefixStore(own_name(ranks, "channels"), default_store()))
        self.under_way: list[Any] = []
        self.promised: weakref.WeakKeyDictionary[Promise, None] = weakref.WeakKeyDictionary()
        self._waiter = Waiter([self], torch.device("cpu"), ENDED)
        self.users: Counter[str] = Counter()
        self._last: Announcement | None = None
        self.groups = [
            host_group(PrefixStore(f"gloo/{stage}/{members[0]}", self.store), members, self.rank, timeout)
            for stage, members in enumerate(stages(ranks, self.rank))
        ]
        _living.add(self)

    def largest(self, values: torch.Tensor, stage: int = 0) -> dist.Work:
        """Start to replace integers by their maxima over the ranks of one of the groups."""
        options = AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX  # type: ignore[assignment]
        work: dist.Work = self.groups[stage].allreduce([values], options)
        return work

    def wait(self, work: dist.Work) -> None:
        """Wait for a collective of announcements, and complete meanwhile what others need of this rank before it."""
        self._waiter.wait(work, self._catch_up)

    def gather(self, text: str) -> list[str]:
        """Gather a text from every rank. This is a collective."""
        found = [text]
        for stage in range(len(self.groups)):
            found = [own for part in self._gather(json.dumps(found), stage) for own in json.loads(part)]
        return found

    def _gather(self, text: str, stage: int) -> list[str]:
        data = torch.tensor(list(text.encode()), dtype=torch.uint8, device="cpu")
        length = torch.tensor([len(data)], device="cpu")
        self.wait(self.largest(length, stage))
        padded = torch.zeros(int(length), dtype=torch.uint8, device="cpu")
        padded[: len(data)] = data
        found = [torch.empty_like(padded) for _ in range(self.groups[stage].size())]
        self.wait(self.groups[stage].allgather([found], [padded]))
        return [bytes(own.tolist()).rstrip(b"\0").decode() for own in found]

    # -- announcements -------------------------------------------------------------------------------

    def start(
        self, doing: str, details: str, error: CanzonaError | None = None, apart_from: Promise | None = None
    ) -> Announcement:
        """Start to announce a call, with details that the caller compares, or the error that keeps this rank from it.

        The caller has to ask for the result before it begins collectives.

        Args:
            apart_from: what needs not be complete before this call, of all that was promised.
        """
        self.check()
        self.complete(apart_from)
        if self._last is not None:
            self._last.finish()
        self.count_call()
        self._last = Announcement(self, Notice(doing, str(error or ""), details), error)
        if len(self.groups) > 1:  # no thread starts the second stage for ranks that do other things before they ask
            self._last.finish()
        return self._last

    def complete(self, apart_from: Promise | None = None) -> None:
        """Complete the collectives that earlier announcements promised, so that no rank waits for them."""
        for promise in list(self.promised):
            if promise is not apart_from:
                promise.wait()

    def _catch_up(self) -> None:
        for promise in list(self.promised):
            promise.catch_up()


def stages(ranks: Ranks, rank: int) -> list[Ranks]:
    """The ranks with which one of them reduces, one set after the other: few have to, many as a rectangle."""
    sides = range(1, math.isqrt(len(ranks)) + 1) if len(ranks) >= MANY else (1,)
    side = max(own for own in sides if len(ranks) % own == 0)
    at = ranks.index(rank)
    return [ranks] if side == 1 else [ranks[at - at % side :][:side], ranks[at % side :: side]]


@atexit.register
def close_all() -> None:
    """End the threads of all channels before the interpreter ends; users may still hold optimizers."""
    for channel in list(_living):
        channel.groups, channel._last = [], None


_living: weakref.WeakSet[Channel] = weakref.WeakSet()
os.register_at_fork(after_in_child=_living.clear)  # the threads of these groups are not in the child
_channels: weakref.WeakKeyDictionary[Any, dict[Ranks, Channel]] = weakref.WeakKeyDictionary()


def channel_of(ranks: Sequence[int], group: dist.ProcessGroup, device: torch.device) -> Channel:
    """Return the channel of some ranks. If it is new, this is a collective of theirs. It ends with the default group.

    Args:
        group: a process group of some of them; a new channel has its timeout for tensors of the device.
        device: the device.
    """
    world: Any = dist.group.WORLD
    known = _channels.setdefault(world, {})
    key = tuple(sorted(ranks))
    if key in known:
        known[key].listen()
        known[key].check()
    else:
        known[key] = Channel(key, timedelta(seconds=timeout_of(group, device)))
    return known[key]


def hash_of(text: str) -> str:
    """The SHA-256 of a text, in hexadecimal digits."""
    return hashlib.sha256(text.encode()).hexdigest()
