"""The numbers that data-parallel ranks step with: a digest of them travels with an exchange that backward has anyway.

Each rank steps other matrices and sends them to all, so ranks whose learning rates differ would train on without a
word. Ranks compare the numbers of now, and those that the last step read: code may change them between backward and
step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from canzona_compile.capture.twin import plain_class
from canzona_compile.data_parallel.collectives import DataParallelGroup
from canzona_compile.errors import RankMismatch
from canzona_compile.runtime.store_agreement import first_difference
from canzona_compile.session.shared_numbers import described

DIGEST = 8  # bytes
LARGEST = 255  # of a byte


class ToldNumbers(NamedTuple):
    """A digest that all ranks have put into an exchange.

    Attributes:
        values: the largest of each byte and of its complement over all ranks, on the host.
        arrived: when they are there; None if they are.
        text: what this rank had put into it.
    """

    values: Tensor
    arrived: torch.cuda.Event | None
    text: str


class StepNumbers:
    """Finds out whether all ranks step with the same hyperparameters.

    Args:
        group: the data-parallel ranks.
        optimizers: returns those that step.
        measured: returns what is measured of their steps, as text.
    """

    def __init__(
        self, group: DataParallelGroup, optimizers: Callable[[], Sequence[Optimizer]], measured: Callable[[], str]
    ) -> None:
        self._group, self._optimizers, self._measured = group, optimizers, measured
        self._used: dict[Optimizer, str] = {}  # what the last step of each optimizer read
        self._text = ""  # what this rank told last
        self._late: ToldNumbers | None = None

    def note(self, optimizer: Optimizer) -> None:
        """Remember what a step reads that begins now."""
        self._used[optimizer] = lines_of("in the last step", optimizer)

    def told(self, device: torch.device) -> Tensor:
        """What this rank puts into an exchange of maxima: bytes of a digest, and their complements.

        If all ranks put in the same byte, its maximum and that of its complement add up to `LARGEST`, and else to more.
        """
        now = [lines_of("now", optimizer) for optimizer in self._optimizers()]
        used = [self._used.get(optimizer, "") for optimizer in self._optimizers()]
        self._text = "\n".join([*now, *used]) + self._measured()
        digest = hashlib.sha256(self._text.encode()).digest()[:DIGEST]
        return torch.tensor([*digest, *(LARGEST - byte for byte in digest)], dtype=torch.uint8, device=device)

    def hear(self, values: Tensor) -> None:
        """Look at the result of an exchange. If it lies on a device, the result of the one before is looked at.

        The host would have to wait for the device otherwise, and would start the step late.

        Args:
            values: the maxima over all ranks of what each of them has told.

        Raises:
            RankMismatch: ranks step, or have stepped, with different numbers. Every rank raises.
        """
        answer: ToldNumbers | None = ToldNumbers(values, None, self._text)
        if values.device.type != "cpu":
            arrived = torch.cuda.Event()
            host = values.to("cpu", non_blocking=True)
            arrived.record()
            answer, self._late = self._late, ToldNumbers(host, arrived, self._text)
        if answer is None:
            return
        if answer.arrived is not None:
            answer.arrived.synchronize()
        found = answer.values.tolist()
        if all(a + b == LARGEST for a, b in zip(found[:DIGEST], found[DIGEST:], strict=True)):
            return
        self._used.clear()  # who sets the numbers right may go on
        self._late = None
        texts = everybody(self._group, answer.text)
        raise RankMismatch(
            "the numbers of a step differ between data-parallel ranks; " + first_difference(*zip(*texts, strict=True)),
            hint="set the hyperparameters of the optimizer to the same values, and call measure(), on all ranks, "
            "before backward",
        )


def lines_of(when: str, optimizer: Optimizer) -> str:
    """The hyperparameters of an optimizer, one line for each parameter group."""
    kind = plain_class(optimizer).__name__
    groups = optimizer.param_groups
    return "\n".join(f"{when}, group {g} of {kind} has {described(group)}" for g, group in enumerate(groups))


def everybody(group: DataParallelGroup, text: str) -> list[tuple[int, str]]:
    """The texts of all ranks, each with its global rank. This is a collective."""
    found = {dist.get_rank(): text}
    for own in (group.shard, group.replicate):
        if own is not None:
            parts: list[dict[int, str]] = [{} for _ in range(dist.get_world_size(own))]
            dist.all_gather_object(parts, found, group=own)
            found = {rank: told for part in parts for rank, told in part.items()}
    return sorted(found.items())
