"""Agreement among ranks, before they run a plan and when one of them cannot continue with it.

Planning ends with a collective that compares the plans of all ranks. In a steady step nothing is compared: a rank
that has gradients for the same parameters as before continues without asking. A rank that finds a change does not
start the agreed collectives. It *calls* the other ranks through the store (a key-value server on the host, which
needs no collective) and waits for them. If all ranks call, they have all seen the same change, and they continue
with another program. A rank that did not see the change is waiting for a collective by then. After one second of
waiting it looks for a call and answers it, and every rank raises the same error.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Collection, Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from canzona_compile.compat.torch_private import PrefixStore
from canzona_compile.errors import CanzonaError, InvalidGradient, RankMismatch
from canzona_compile.ir.program_ops import Watch
from canzona_compile.runtime.held_works import waited
from canzona_compile.runtime.meeting import Meeting
from canzona_compile.runtime.process_groups import current_device, new_group_of

PATIENCE = timedelta(seconds=1)
LEFT_THE_STEP = (
    "a peer died, or does not call step(): see what the other ranks wrote. What belongs to this micro-group was not "
    "updated, so load a checkpoint to go on"
)


class Subject(NamedTuple):
    """What ranks may disagree about: the problem that a difference means, and what to do about it."""

    problem: str
    hint: str


MISSING_GRADIENTS = Subject(
    "gradients are missing on some ranks only",
    "give every rank the gradient (zeros count) or none (grad=None on all ranks skips the parameter)",
)


class StoreAgreement:
    """A set of ranks that run collectives together and agree on what they run.

    The constructor runs a collective, so every member must create its agreements in the same order.

    Args:
        ranks: the global ranks of the members, ascending.
        group: the process group of these ranks.
        device: the device of the tensors that the collectives of a step move.
        about: what the members disagree about if their findings differ.

    Attributes:
        meeting: where members wait for each other before a call that needs all of them.
    """

    def __init__(
        self, ranks: Sequence[int], group: dist.ProcessGroup, device: torch.device, about: Subject = MISSING_GRADIENTS
    ) -> None:
        self.ranks, self.group, self.device, self.about = tuple(ranks), group, device, about
        self.rank = dist.get_rank()
        token = self.share(f"{time.time_ns()}")[0]
        store = dist.distributed_c10d._get_default_store()
        self.store = PrefixStore(f"canzona/{token}/{'-'.join(map(str, self.ranks))}", store)
        self.host_group = group if has_host_backend(group) else host_group(self.ranks)
        self.meeting = Meeting(PrefixStore("meet", self.store), self.ranks, self.rank, self._hear_broken)
        self.settled = 0  # the last step in which all members called with the same finding

    def share(self, value: str) -> list[str]:
        """Gather one string from every member. This is a collective.

        Args:
            value: the string of this rank.

        Returns:
            The strings of all members, in the order of `ranks`.
        """
        values: list[str | None] = [None] * len(self.ranks)
        with current_device(self.device):
            dist.all_gather_object(values, value, group=self.group)
        return [v or "" for v in values]

    def agree(self, text: str, error: CanzonaError | None, missing: str = "") -> None:
        """Compare the plans of all members before the first step of a plan. This is a collective.

        Args:
            text: the plan as text, line by line.
            error: the error that kept this rank from making a plan; None if it made one.
            missing: what `about` names that this rank lacks; the plan as text differs where this does.

        Raises:
            CanzonaError: a member failed, or the plans differ. Every member raises.
        """
        failures = self.share(str(error or ""))
        if error is not None:
            raise error
        for rank, failure in zip(self.ranks, failures, strict=True):
            if failure:
                raise RankMismatch(f"rank {rank} cannot run this step:\n{failure}")
        if len(set(self.share(str(hash_of(text))))) == 1:
            return
        told = [json.loads(t) for t in self.share(json.dumps([text, missing]))]
        if len({lacking for _, lacking in told}) > 1:
            raise self._disagreement({rank: own for rank, (_, own) in zip(self.ranks, told, strict=True)})
        texts = [own for own, _ in told]
        raise RankMismatch(
            "ranks made different plans; " + first_difference(self.ranks, texts),
            hint="build the optimizer from the same parameters, in the same order, with the same options on every rank",
        )

    def compare(self, change: str, numbers: str, error: CanzonaError | None, watch: Watch) -> CanzonaError | None:
        """Compare what the members found before a step. This is a collective on the host.

        Args:
            change: what changed since the last step.
            numbers: the numbers that the step reads.
            error: the error that keeps this rank from taking the step; None if it can take it.
            watch: waits for the collective.

        Returns:
            The error that this rank has to raise; None if all members found the same and can take the step.
        """
        text = json.dumps([str(error or ""), change, numbers])
        digest = int(hash_of(text)[:14], 16)
        values = torch.tensor([digest, -digest])
        work = dist.all_reduce(values, dist.ReduceOp.MAX, group=self.host_group, async_op=True)
        assert work is not None
        watch.wait(work)
        largest, smallest = values.tolist()
        if largest == -smallest:
            return error
        found = {r: json.loads(told) for r, told in zip(self.ranks, self.share(text), strict=True)}
        if error is not None:
            return error
        for rank, (failure, _, _) in found.items():
            if failure:
                return RankMismatch(f"rank {rank} cannot run this step:\n{failure}")
        if len({change for _, change, _ in found.values()}) > 1:
            return self._disagreement({rank: change for rank, (_, change, _) in found.items()})
        return RankMismatch(
            "the numbers that this step reads differ between ranks, and nothing was updated; "
            + first_difference(self.ranks, [own for _, _, own in found.values()]),
            hint="set hyperparameters, state and attributes of the optimizer to the same values on all ranks, and call "
            "measure() on all of them",
        )

    # -- when something changes in a steady state ---------------------------------------------------

    def call(self, number: int, finding: str, error: CanzonaError | None) -> None:
        """Tell the other members that this rank does not start the collectives that were agreed for a step.

        Args:
            number: the number of the step.
            finding: what this rank found changed.
            error: the error that keeps this rank from taking the step; None if it can take it.
        """
        self.store.set(f"{number}/{self.rank}", json.dumps([finding, str(error or "")]))
        self.store.set(f"call/{number}", str(self.rank))

    def hear(self, number: int, finding: str) -> None:
        """After a call, wait until every member has called with the same finding.

        Args:
            number: the number of the step.
            finding: what this rank found changed, as it was given to `call`.

        Raises:
            CanzonaError: a member failed, found something else, or did not answer within the timeout of the process
                group. Every member raises, and nothing was updated.
        """
        others = [r for r in self.ranks if r != self.rank]
        findings = {self.rank: finding}
        deadline = time.monotonic() + timeout_of(self.group, self.device)
        while others:
            if time.monotonic() > deadline:
                raise RankMismatch(f"ranks {others} did not answer before the process group's timeout")
            for rank in list(others):
                if self.store.check([f"{number}/{rank}"]):
                    findings[rank], failure = json.loads(self.store.get(f"{number}/{rank}"))
                    if failure:
                        raise RankMismatch(f"rank {rank} cannot run this step:\n{failure}")
                    others.remove(rank)
            if len(set(findings.values())) > 1:
                raise self._disagreement(findings)
            self._hear_failure(number)
            time.sleep(0.001)
        self.settled = number

    def listen(self, number: int) -> None:
        """Answer a call, if there is one, while this rank waits for a collective.

        Args:
            number: the number of the step whose collective this rank waits for.

        Raises:
            CanzonaError: a member called or failed, so the collective will not complete.
        """
        self._hear_failure(number)
        if self.settled == number or not self.store.check([f"call/{number}"]):
            return
        self.store.set(f"{number}/{self.rank}", json.dumps(["", ""]))
        caller = int(self.store.get(f"call/{number}"))
        finding, failure = json.loads(self.store.get(f"{number}/{caller}"))
        if failure:
            raise RankMismatch(f"rank {caller} cannot run this step:\n{failure}")
        raise self._disagreement({caller: finding, self.rank: ""})

    def fail(self, error: CanzonaError, number: int | None = None) -> None:
        """Tell the other members that this rank raised an error, possibly because of another agreement.

        Args:
            error: the error that this rank raises.
            number: the number of the step. None means that a collective broke, so no later step can work either.
        """
        with contextlib.suppress(RuntimeError):  # the store may have died with its host
            self.store.set("broken" if number is None else f"failed/{number}", str(error))

    def _hear_failure(self, number: int) -> None:
        self._hear_broken(f"failed/{number}")

    def _hear_broken(self, *keys: str) -> None:
        for key in (*keys, "broken"):
            if self.store.check([key]):
                raise RankMismatch(self.store.get(key).decode())

    def _disagreement(self, findings: dict[int, str]) -> CanzonaError:
        said = "; ".join(f"rank {r}: {finding or 'no change'}" for r, finding in sorted(findings.items()))
        return InvalidGradient(f"{self.about.problem} ({said}); nothing was updated", hint=self.about.hint)


def has_host_backend(group: dist.ProcessGroup) -> bool:
    """Tell whether a process group runs collectives of tensors on the CPU."""
    return any(device.type == "cpu" for device in group._device_types)


def host_group(ranks: Sequence[int]) -> dist.ProcessGroup:
    """Make a process group of the host beside one of devices. This is a collective of its ranks."""
    return new_group_of(ranks, backend="gloo")


def hash_of(text: str) -> str:
    """The SHA-256 of a text, in hexadecimal digits."""
    return hashlib.sha256(text.encode()).hexdigest()


def first_difference(ranks: Sequence[int], texts: Sequence[str]) -> str:
    """Find the first line in which the plan of a member differs from the plan of the first member.

    Args:
        ranks: the global ranks of the members.
        texts: the plan of each member as text, in the order of `ranks`.

    Returns:
        A text for an error message, with both lines.
    """
    base = texts[0].splitlines()
    for rank, text in zip(ranks[1:], texts[1:], strict=True):
        lines = text.splitlines()
        for i in range(max(len(base), len(lines))):
            here = base[i] if i < len(base) else "(nothing)"
            there = lines[i] if i < len(lines) else "(nothing)"
            if here != there:
                return f"the first difference:\n  rank {ranks[0]}: {here.strip()}\n  rank {rank}: {there.strip()}"
    return "no line differs"


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> float:
    """Return the timeout of a process group on a device, in seconds."""
    options = getattr(group._get_backend(device), "options", None)
    timeout: timedelta = getattr(options, "_timeout", dist.default_pg_timeout)
    return timeout.total_seconds()


class Waiter:
    """Waits for the collectives of a step and listens for calls meanwhile. Implements `program_ops.Watch`.

    Args:
        agreements: those in which it listens; the collection may grow later.
        device: the device of the tensors that the collectives move.
        hint: what a collective that fails means.

    Attributes:
        number: the number of the step whose collectives it waits for. The caller sets it before each step.
    """

    def __init__(self, agreements: Collection[StoreAgreement], device: torch.device, hint: str = LEFT_THE_STEP) -> None:
        self.agreements, self.device, self.hint, self.number = agreements, device, hint, 0

    def wait(self, work: dist.Work) -> None:
        """Wait for a collective. On the CPU the host waits; on other devices the current stream waits.

        Args:
            work: the collective, which was started asynchronously.

        Raises:
            CanzonaError: the collective failed, or a peer called and will not take part in it.
        """
        if self.device.type != "cpu":  # the watchdog of NCCL ends a collective that hangs; none is ever recorded
            work.wait()
            return
        while True:
            begin = time.monotonic()
            try:
                work.wait(PATIENCE)
                waited(work)
                return
            except RuntimeError:  # `wait` raises the same type for a timeout and for a failure
                # Work of gloo's reduce-scatter is never complete once it failed; but then no time passes in `wait`.
                if work.is_completed() or time.monotonic() - begin < PATIENCE.total_seconds() / 2:
                    break
            self._listen()
        try:
            work.wait()  # returns at once: the work succeeded as the timeout ran out, or this raises the reason
        except RuntimeError as error:
            failure = CanzonaError(
                f"a collective of this step failed: {str(error).splitlines()[0]}",
                hint=self.hint,
            )
            for agreement in self.agreements:
                agreement.fail(failure)
            raise failure from error

    def _listen(self) -> None:
        try:
            for agreement in self.agreements:
                agreement.listen(self.number)
        except CanzonaError as error:
            for agreement in self.agreements:
                agreement.fail(error, self.number)
            raise
