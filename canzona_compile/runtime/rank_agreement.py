"""The ranks of one optimizer in agreement: the forums of its meshes, and what is compared there."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from canzona_compile.errors import CanzonaError
from canzona_compile.ir.printer import show
from canzona_compile.ir.step import Step
from canzona_compile.runtime.process_groups import Groups
from canzona_compile.runtime.store_agreement import Forum, Waiter

Ranks = tuple[int, ...]


class Council:
    """All forums that this rank's parameters need. Every rank of a mesh makes the same calls in order."""

    def __init__(self, groups: Groups, device: torch.device) -> None:
        self.groups, self.device = groups, device
        self._forums: dict[Ranks, Forum] = {}

    def report(self, members: Iterable[Ranks], error: CanzonaError | None) -> None:
        """Tell the ranks of every mesh whether this rank could plan; raises on all of them if one could not."""
        for ranks in sorted(r for r in members if len(r) > 1):
            error = self._agree(ranks, "", error)
        if error is not None:
            raise error

    def compare(self, owned: Step, options: str, present: Iterable[str]) -> None:
        """Compare plans among the ranks that run them together; raises RankMismatch on all if they differ.

        Ranks may hold further parameters on other meshes, so where there are several sets of ranks each
        compares its own tasks.
        """
        grids = {t.layout.grid.members() for t in owned.tasks if t.layout.grid.size > 1}
        present = list(present)
        error: CanzonaError | None = None
        for ranks in sorted(grids):
            own = [t for t in owned.tasks if t.layout.grid.members() == ranks]
            names = {t.name for t in own}
            lines = [options, *(line for line in present if line.split(" has ")[0] in names)]
            if len(own) == len(owned.tasks):
                lines.append(show(owned))
            else:
                lines += [f"{t.name} {list(t.shape)} {t.placed} {t.layout.placements} owner {t.owner}" for t in own]
            error = self._agree(ranks, "\n".join(lines), error)
        if error is not None:
            raise error

    def _agree(self, ranks: Ranks, text: str, error: CanzonaError | None) -> CanzonaError | None:
        """Agree in one forum, and hand on to the next what failed here: its ranks may not be in this one."""
        try:
            self._forum(ranks).agree(text, error)
        except CanzonaError as found:
            return found
        return None

    def call(self, number: int, change: str, error: CanzonaError | None) -> None:
        """In a steady state: make sure that everybody saw this change, or raise on every rank."""
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
        """Tell everybody that this rank raised in the midst of a step, so that nobody waits for it."""
        for forum in self._forums.values():
            forum.fail(error, number)

    def waiter(self) -> Waiter:
        return Waiter(list(self._forums.values()), self.device)

    def _forum(self, ranks: Ranks) -> Forum:
        if ranks not in self._forums:
            self._forums[ranks] = Forum(ranks, self.groups.of(ranks), self.device)
        return self._forums[ranks]
