"""The ranks of one optimizer in agreement: the forums of its meshes, and what is compared there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from canzona_compile.errors import CanzonaError
from canzona_compile.ir.printer import show
from canzona_compile.ir.step import Step
from canzona_compile.runtime.process_groups import Groups
from canzona_compile.runtime.store_agreement import StoreAgreement, Waiter

Ranks = tuple[int, ...]


class RankAgreement:
    """All forums that this rank's parameters need. Every rank of a mesh makes the same calls in the same order.

    Args:
        groups: finds the process group of each forum.
        device: of the parameters.

    Attributes:
        waiter: waits for collectives, and meanwhile listens in all forums.
    """

    def __init__(self, groups: Groups, device: torch.device) -> None:
        self.groups, self.device = groups, device
        self._forums: dict[Ranks, StoreAgreement] = {}
        self.waiter = Waiter(self._forums.values(), device)

    def report(self, members: Iterable[Ranks], error: CanzonaError | None) -> None:
        """Tell the ranks of every mesh whether this rank could plan.

        Args:
            members: the ranks of each mesh.
            error: what kept this rank from planning.

        Raises:
            CanzonaError: on all of these ranks, if one of them could not plan.
        """
        for ranks in sorted(r for r in members if len(r) > 1):
            error = self._agree(ranks, "", error)
        if error is not None:
            raise error

    def compare(self, owned: Step, options: str, present: Mapping[str, str]) -> None:
        """Compare plans among the ranks that run them together.

        Ranks may hold further parameters on other meshes, so where there are several sets of ranks each
        compares its own tasks.

        Args:
            owned: the plan's step, with owners.
            options: the options, as text.
            present: by task, in the plan's order, what it has on this step ("a gradient", ...).

        Raises:
            RankMismatch: on all of these ranks, if plans differ.
        """
        grids = {t.layout.grid.members() for t in owned.tasks if t.layout.grid.size > 1}
        error: CanzonaError | None = None
        for ranks in sorted(grids):
            own = [t for t in owned.tasks if t.layout.grid.members() == ranks]
            names = {t.name for t in own}
            lines = [options, *(f"{name} has {what}" for name, what in present.items() if name in names)]
            if len(own) == len(owned.tasks):
                lines.append(show(owned))
            else:
                lines += [f"{t.name} {list(t.shape)} {t.placed} {t.layout.placements} owner {t.owner}" for t in own]
            error = self._agree(ranks, "\n".join(lines), error)
        if error is not None:
            raise error

    def _agree(self, ranks: Ranks, text: str, error: CanzonaError | None) -> CanzonaError | None:
        """Agree in one forum. Returns what failed here, for the next forum: its ranks may not be in this one."""
        try:
            self._forum(ranks).agree(text, error)
        except CanzonaError as found:
            return found
        return None

    def call(self, number: int, change: str, error: CanzonaError | None) -> None:
        """In a steady state: make sure that everybody saw the change that this rank saw.

        Args:
            number: of the step.
            change: the change, as text; ranks that saw the same have the same text.
            error: what keeps this rank from taking the step.

        Raises:
            CanzonaError: on every rank, if one did not see the change or cannot take the step.
        """
        forums = list(self._forums.values())
        for forum in forums:  # all of them before waiting for any: who hears one raises in all
            forum.call(number, change, error)
        if error is not None:
            raise error
        try:
            for forum in forums:
                forum.hear(number, change)
        except CanzonaError as failure:
            for forum in forums:
                forum.fail(failure, number)
            raise

    def fail(self, number: int, error: CanzonaError) -> None:
        """Tell everybody that this rank raised in the midst of step `number`, so that nobody waits for it."""
        for forum in self._forums.values():
            forum.fail(error, number)

    def _forum(self, ranks: Ranks) -> StoreAgreement:
        if ranks not in self._forums:
            self._forums[ranks] = StoreAgreement(ranks, self.groups.of(ranks), self.device)
        return self._forums[ranks]
