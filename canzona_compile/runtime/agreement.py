"""What ranks compare before they go on, and the errors if they do not have it in common.

An optimizer or a model announces a call on the channel of its ranks, with details by topic, see `channel.py`. If texts
of a topic differ, all ranks raise, and nothing has begun.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from canzona_compile.compat.torch_private import PrefixStore
from canzona_compile.errors import CanzonaError, InvalidGradient, RankMismatch
from canzona_compile.ir.layout import Ranks
from canzona_compile.runtime.channel import Announcement, Channel, Promise, hash_of
from canzona_compile.runtime.error_board import ErrorBoard
from canzona_compile.runtime.meeting import Meeting

Details = Mapping[str, str]  # by topic
PLANNING = "planning"  # the call before a plan is used, and in which ranks tell each other texts


class Topic(NamedTuple):
    """What must be equal on all ranks.

    Attributes:
        problem: what a difference means, with the `call`, what each rank has `said`, or the first `line` that differs.
        shown: the detail that an error shows in place of the one that ranks compare.
    """

    problem: str
    hint: str
    kind: type[CanzonaError] = RankMismatch
    shown: str = ""


TOPICS = {
    "plan": Topic(
        "ranks made different plans; {line}",
        "on every rank, build the optimizer from the same parameters, in the same order, with the same options, and "
        "load checkpoints on all ranks or on none",
    ),
    "present": Topic(
        "gradients are missing on some ranks only ({said}); nothing was updated",
        'pass missing_grads="zero", or set the gradient on all ranks (zeros count) or on none',
        InvalidGradient,
    ),
    "change": Topic(
        "different things changed on ranks before this step ({said}); nothing was updated",
        "change hyperparameters, state, parameters and parameter groups in the same way on all ranks",
        shown="said",  # with the names of what not all of the ranks share
    ),
    "gradients": Topic(
        "gradients are missing on some ranks only ({said}); nothing was updated",
        "set gradients to None on all ranks or on none, and call zero_grad() on all of them",
        InvalidGradient,
    ),
    "scalings": Topic(
        "gradients were scaled differently on some ranks ({said}); nothing was updated",
        "scale gradients in the same way on all ranks; to clip, call optimizer.canzona.clip_grad_norm_(max_norm)",
        InvalidGradient,
    ),
    "state": Topic(
        "the optimizer state differs between ranks ({said}); nothing was updated",
        "load the same checkpoint, or clear the state of the optimizer, on all ranks",
    ),
    "arguments": Topic(
        "{call} was called with different arguments on some ranks ({said}); nothing was changed",
        "pass the same arguments to this call on all ranks",
    ),
    "numbers": Topic(
        "hyperparameters or other numbers of the step differ between ranks, and nothing was updated; {line}",
        "set hyperparameters, state and attributes of the optimizer to the same values on all ranks, and call "
        "measure() on all of them",
    ),
}


class Agreement:
    """Compares what one optimizer or model is about to do with the other ranks of a channel.

    Args:
        channel: of the ranks; None if this rank is alone, which compares nothing.
    """

    def __init__(self, channel: Channel | None, what: str) -> None:
        self.channel, self._what = channel, what
        self._number: int | None = None

    @property
    def ranks(self) -> Ranks:
        """The global ranks, ascending; none if this rank is alone."""
        return () if self.channel is None else self.channel.ranks

    @property
    def name(self) -> str:
        """What it concerns, with its number among those of its kind on these ranks; until it has one, the next one."""
        if self.channel is None:
            return self._what
        return f"{self._what} {self.channel.users[self._what] if self._number is None else self._number}"

    def take_number(self) -> None:
        """Take a number for good, once all ranks are known to have the same optimizer or model in mind.

        After a planning that ranks entered with different optimizers, the next one begins with equal numbers again.
        """
        if self.channel is not None and self._number is None:
            self._number = self.channel.users[self._what]
            self.channel.users[self._what] += 1

    @cached_property
    def meeting(self) -> Meeting | None:
        """Where ranks wait for one another before a call that some of them may not make; None if alone."""
        if self.channel is None:
            return None
        self.take_number()
        store = PrefixStore(f"meet/{self.name}", self.channel.store)
        return Meeting(store, self.channel)

    def start(self, call: str, error: CanzonaError | None = None) -> Announcement:
        """Start to announce a call without details to the others, which there are; see `Channel.start`."""
        assert self.channel is not None
        return self.channel.start(f"{call} of {self.name}", "{}", error)

    def compare(
        self, call: str, by_topic: Details, error: CanzonaError | None = None, apart_from: Promise | None = None
    ) -> Sequence[Details]:
        """Announce a call, and wait until all ranks have announced the same. This is a collective on the host.

        It is an all-reduce of two integers; texts are exchanged only if they differ.

        Args:
            error: what keeps this rank from it; None if nothing does.
            apart_from: see `Channel.start`.
        """
        if self.channel is None:
            if error is not None:
                raise error
            return [by_topic]
        doing, details = f"{call} of {self.name}", by_topic
        if (plan := by_topic.get("plan")) is not None:  # too long to be sent to all ranks unless it differs
            details = {**by_topic, "plan": hash_of(plan)}
        texts = self.channel.start(doing, json.dumps(details), error, apart_from).result()
        self.take_number()
        if len(set(texts)) == 1:
            return [by_topic] * len(texts)
        answers = [json.loads(text) for text in texts]
        for topic in filter(TOPICS.__contains__, by_topic):
            if len({own.get(topic) for own in answers}) > 1:
                if topic == "plan":
                    answers = [json.loads(text) for text in self.channel.start(doing, json.dumps(by_topic)).result()]
                by_rank = dict(zip(self.ranks, answers, strict=True))
                shown = TOPICS[topic].shown or topic
                raise disagreement(call, topic, {rank: own.get(shown, "") for rank, own in by_rank.items()})
        return answers

    def share(self, text: str, error: CanzonaError | None = None) -> list[str]:
        """Gather a text from every rank, in their order. This is a collective on the host."""
        return [own["text"] for own in self.compare(PLANNING, {"text": text}, error)]

    @property
    def boards(self) -> list[ErrorBoard]:
        """Where the other ranks tell of errors; nowhere if this rank is alone."""
        return [] if self.channel is None else [self.channel]

    def check(self) -> None:
        """Raise if an earlier call failed on its way."""
        if self.channel is not None:
            self.channel.check()

    def on_its_way(self) -> contextlib.AbstractContextManager[None]:
        """Inside this context collectives run that were announced, see `ErrorBoard.on_its_way`."""
        return contextlib.nullcontext() if self.channel is None else self.channel.on_its_way()

    def interrupt(self, error: BaseException) -> None:
        """Tell the other ranks of an error on the way through a call."""
        if self.channel is not None:
            self.channel.interrupt(error)


def disagreement(call: str, topic: str, found: Mapping[int, str]) -> CanzonaError:
    """The error that all ranks raise whose texts of a topic differ."""
    bare = ("no gradient", "every gradient", "new code")
    if topic == "change" and all(own.startswith(bare) for own in found.values() if own):
        topic = "present" if any(own.startswith("no gradient") for own in found.values()) else topic
    own = TOPICS[topic]
    said = "; ".join(f"rank {rank}: {text or 'no change'}" for rank, text in found.items())
    return own.kind(own.problem.format(call=call, said=said, line=first_differing_line(found)), hint=own.hint)


def first_differing_line(found: Mapping[int, str]) -> str:
    """The first line in which the text of a rank differs from that of the first one, for an error message."""
    (first, text), *others = found.items()
    base = text.splitlines()
    for rank, other in others:
        lines = other.splitlines()
        for i in range(max(len(base), len(lines))):
            here = base[i] if i < len(base) else "(nothing)"
            there = lines[i] if i < len(lines) else "(nothing)"
            if here != there:
                return f"the first difference:\n  rank {first}: {here.strip()}\n  rank {rank}: {there.strip()}"
    return "no line differs"
