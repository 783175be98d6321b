"""Agreement among ranks, before they run a plan and before every step with it.

Planning ends with a comparison of the plans of all ranks, and every step begins with one of what each rank found and
of the numbers that it reads. Both go through the channel of these ranks, see `channel.py`, on the host. A rank that
fails on its way through a step tells the others through the store, and they hear of it while they wait.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta
from functools import cached_property

import torch
import torch.distributed as dist

from canzona_compile.compat.torch_private import PrefixStore
from canzona_compile.errors import CanzonaError, InvalidGradient, RankMismatch
from canzona_compile.runtime.channel import channel_of, hash_of
from canzona_compile.runtime.meeting import Meeting
from canzona_compile.runtime.process_groups import timeout_of

# What ranks may disagree about: the problem that a difference means, and what to do about it.
MISSING_GRADIENTS = (
    "gradients are missing on some ranks only",
    'pass missing_grads="zero", or set the gradient on all ranks (zeros count) or on none',
)
CHANGED_APART = (
    "different things changed on ranks before this step",
    "change hyperparameters, state, parameters and parameter groups in the same way on all ranks",
)


class StoreAgreement:
    """A set of ranks that run collectives together and agree on what they run.

    The constructor may run a collective, so every member must create its agreements in the same order.

    Args:
        ranks: the global ranks of the members, ascending.
        group: the process group of these ranks that the user or torch made; its timeout holds here, too.
        device: the device of the tensors that the collectives of a step move.
        what: what the agreement is about, as "optimizer (Muon)".

    Attributes:
        channel: where the members announce what they do. Other optimizers and models share it.
    """

    def __init__(self, ranks: Sequence[int], group: dist.ProcessGroup, device: torch.device, what: str) -> None:
        self.ranks, self.rank = tuple(ranks), dist.get_rank()
        self.channel = channel_of(ranks, timedelta(seconds=timeout_of(group, device)))
        self._what = what
        self._number: int | None = None

    @property
    def name(self) -> str:
        """What the agreement is about, with the number of the optimizer among those of its class on these ranks."""
        number = self.channel.next_number(self._what) if self._number is None else self._number
        return f"{self._what}, number {number}"

    def _take_number(self) -> None:
        """Give the optimizer its number, once all members are known to plan the same one.

        After a planning that ranks entered with different optimizers, the next one begins with equal numbers again.
        """
        if self._number is None:
            self._number = self.channel.number(self._what)

    @cached_property
    def meeting(self) -> Meeting:
        """Where members wait for each other before a call that needs all of them."""
        self._take_number()
        meetings = PrefixStore(f"meet/{self.name}", self.channel.store)
        return Meeting(meetings, self.ranks, self.rank, self.channel.listen)

    def share(self, value: str, error: CanzonaError | None = None) -> list[str]:
        """Gather one string from every member, in the order of `ranks`. This is a collective on the host.

        Raises:
            CanzonaError: a member failed, or an `error` keeps one from planning. Every member raises.
        """
        told = self.channel.exchange(f"planning of {self.name}", value, error)
        self._take_number()
        return told

    def agree(self, text: str, error: CanzonaError | None, missing: str = "", least: int = 0) -> int:
        """Compare the plans of all members, as text, before the first step of a plan. This is a collective.

        Args:
            error: the error that kept this rank from making a plan; None if it made one.
            missing: which gradients this rank lacks; where this differs, the plans do.
            least: a number of this rank, of which the least one of any member is returned.

        Raises:
            CanzonaError: a member failed, or the plans differ. Every member raises.
        """
        hashes, numbers = zip(*(told.split() for told in self.share(f"{hash_of(text)} {least}", error)), strict=True)
        if len(set(hashes)) == 1:
            return min(map(int, numbers))
        told = [json.loads(t) for t in self.share(json.dumps([text, missing]))]
        if len({lacking for _, lacking in told}) > 1:
            raise self._disagreement({rank: own for rank, (_, own) in zip(self.ranks, told, strict=True)})
        texts = [own for own, _ in told]
        raise RankMismatch(
            "ranks made different plans; " + first_difference(self.ranks, texts),
            hint="on every rank, build the optimizer from the same parameters, in the same order, with the same "
            "options, and load checkpoints on all ranks or on none",
        )

    def compare(self, change: str, numbers: str, error: CanzonaError | None, others: str = "") -> CanzonaError | None:
        """Compare what the members found before a step, and the numbers that it reads. A collective on the host.

        It is an all-reduce of two integers; texts are exchanged only if they differ. `error` keeps this rank from
        taking the step, and `others` names the optimizers that step with this one.

        Returns:
            The error that this rank has to raise; None if all members found the same and can take the step.

        Raises:
            CanzonaError: a member died, or failed on its way through an earlier step.
        """
        announced = self.channel.start(f"step() of {self.name}{others}", json.dumps([change, numbers]), error)
        announced.finish()
        try:
            told = announced.result()
        except CanzonaError as verdict:
            return verdict
        if len(set(told)) == 1:
            return None
        found = dict(zip(self.ranks, map(json.loads, told), strict=True))
        if len({change for change, _ in found.values()}) > 1:
            return self._disagreement({rank: change for rank, (change, _) in found.items()})
        return RankMismatch(
            "hyperparameters or other numbers of the step differ between ranks, and nothing was updated; "
            + first_difference(self.ranks, [own for _, own in found.values()]),
            hint="set hyperparameters, state and attributes of the optimizer to the same values on all ranks, and call "
            "measure() on all of them",
        )

    def _disagreement(self, findings: dict[int, str]) -> CanzonaError:
        said = "; ".join(f"rank {r}: {finding or 'no change'}" for r, finding in sorted(findings.items()))
        found = [own for own in findings.values() if own]
        missing = any(own.startswith("no gradient") for own in found) and all(
            own.startswith(("no gradient", "every gradient", "new code")) for own in found
        )
        kind, (problem, hint) = (InvalidGradient, MISSING_GRADIENTS) if missing else (RankMismatch, CHANGED_APART)
        return kind(f"{problem} ({said}); nothing was updated", hint=hint)


def first_difference(ranks: Sequence[int], texts: Sequence[str]) -> str:
    """The first line in which the plan of a member differs from that of the first member, for an error message."""
    base = texts[0].splitlines()
    for rank, text in zip(ranks[1:], texts[1:], strict=True):
        lines = text.splitlines()
        for i in range(max(len(base), len(lines))):
            here = base[i] if i < len(base) else "(nothing)"
            there = lines[i] if i < len(lines) else "(nothing)"
            if here != there:
                return f"the first difference:\n  rank {ranks[0]}: {here.strip()}\n  rank {rank}: {there.strip()}"
    return "no line differs"
