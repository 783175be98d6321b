"""What data-parallel ranks must have in common before they go on, and the errors if they do not."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from canzona_compile.compat.optimizer_class import plain_class
from canzona_compile.compat.torch_private import PrefixStore
from canzona_compile.errors import CanzonaError, InvalidGradient, RankMismatch
from canzona_compile.runtime.channel import Announcement, Channel, channel_of
from canzona_compile.runtime.meeting import Meeting
from canzona_compile.runtime.process_groups import timeout_of
from canzona_compile.runtime.store_agreement import first_difference
from canzona_compile.session.variant_selection import described

Details = Mapping[str, str]  # by topic
BROKEN = "look at the output of the other ranks. Shards of gradients and parameters are lost: restart from a checkpoint"
HINTS = {
    "gradients": "set gradients to None on all ranks or on none, and call zero_grad() on all of them",
    "scalings": "scale gradients in the same way on all ranks; to clip, call "
    "optimizer.canzona.clip_grad_norm_(max_norm)",
    "state": "load the same checkpoint, or clear the state of the optimizer, on all ranks",
    "numbers": "set the same hyperparameters on all ranks, and call measure() on all of them or none",
    "arguments": "pass the same arguments to this call on all ranks",
}


class Announcer:
    """Announces what one model is about to do on all of its data-parallel ranks. Alone, it announces nothing.

    Args:
        ranks: the global ranks; empty or one if this rank is alone.
        group: a process group of some of them, whose timeout is that of announcements if they have no channel yet.
        device: the device of the parameters.

    Attributes:
        channel: of these ranks; None if this rank is alone.
        meeting: where they wait for one another before calls that some of them may not make; None if alone.
        name: of the model, for messages.
    """

    def __init__(
        self,
        ranks: Sequence[int] = (),
        group: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.channel: Channel | None = None
        self.meeting: Meeting | None = None
        self.name = "model"
        if len(ranks) > 1:
            assert group is not None and device is not None
            self.channel = channel_of(ranks, timedelta(seconds=timeout_of(group, device)))
            self.name = f"model {self.channel.number('model')}"
            store = PrefixStore(f"meet/{self.name}", self.channel.store)
            self.meeting = Meeting(store, self.channel.ranks, self.channel.rank, self.channel.listen)

    def start(self, call: str, error: CanzonaError | None = None) -> Announcement | None:
        """Start to announce a call without details; see `Channel.start`. What was promised is completed first."""
        if self.channel is not None:
            self.channel.complete()
            return self.channel.start(f"{call} of {self.name}", "{}", error)
        if error is not None:
            raise error
        return None

    def agree(self, call: str, details: Details, error: CanzonaError | None = None, gathering: Any = None) -> None:
        """Announce a call, and wait until all ranks have announced the same. This is a collective on the host.

        Args:
            call: what this rank is about to do.
            details: what must be equal on all ranks, by topic, see `HINTS`.
            error: what keeps this rank from it; None if nothing does.
            gathering: what this model has promised, which this call does not have to complete.

        Raises:
            CanzonaError: a rank cannot go on, or does something else, or with other details. Every rank raises.
        """
        channel = self.channel
        if channel is None:
            if error is not None:
                raise error
            return
        channel.check()
        channel.complete(gathering)
        told = channel.exchange(f"{call} of {self.name}", json.dumps(details), error)
        if len(set(told)) > 1:
            raise difference(call, channel.ranks, [json.loads(own) for own in told])

    @property
    def listeners(self) -> list[Channel]:
        """What listens to other ranks; nothing if this rank is alone."""
        return [] if self.channel is None else [self.channel]

    def waits(self, number: int) -> None:
        """Tell the other ranks that this one waits for a gather of the model; see `Channel.tell_waiting`."""
        if self.channel is not None:
            self.channel.tell_waiting(self.name, number)

    def check(self) -> None:
        """Raise if an earlier call failed on its way."""
        if self.channel is not None:
            self.channel.check()

    def on_its_way(self) -> contextlib.AbstractContextManager[None]:
        """Inside this context collectives run that were announced, see `Channel.on_its_way`."""
        return contextlib.nullcontext() if self.channel is None else self.channel.on_its_way()

    def interrupt(self, error: BaseException) -> None:
        """Tell the other ranks of an error on the way through a call."""
        if self.channel is not None:
            self.channel.interrupt(error)


def difference(call: str, ranks: Sequence[int], told: Sequence[Details]) -> CanzonaError:
    """The error that all ranks raise whose details differ: of the first topic that does."""
    topic = next(t for t in told[0] if len({own[t] for own in told}) > 1)
    found = {rank: own[topic] for rank, own in zip(ranks, told, strict=True)}
    said = "; ".join(f"rank {rank}: {text or 'no change'}" for rank, text in found.items())
    hint = HINTS[topic]
    if topic == "gradients":
        return InvalidGradient(f"gradients are missing on some ranks only ({said}); nothing was updated", hint=hint)
    if topic == "scalings":
        problem = f"gradients were scaled differently on some ranks ({said}); nothing was updated"
        return InvalidGradient(problem, hint=hint)
    if topic == "state":
        return RankMismatch(f"the optimizer state differs between ranks ({said}); nothing was updated", hint=hint)
    if topic == "arguments":
        return RankMismatch(
            f"{call} was called with different arguments on some ranks ({said}); nothing was changed", hint=hint
        )
    return RankMismatch(
        "hyperparameters or other numbers of the step differ between ranks, and nothing was updated; "
        + first_difference(ranks, list(found.values())),
        hint=hint,
    )


def numbers_of(optimizer: Optimizer) -> str:
    """The hyperparameters of an optimizer, one line for each parameter group."""
    kind, groups = plain_class(optimizer).__name__, optimizer.param_groups
    return "\n".join(f"group {g} of {kind} has {described(group)}" for g, group in enumerate(groups))
