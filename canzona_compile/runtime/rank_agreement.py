"""Agreement among all ranks of one optimizer: one per mesh, and what the ranks compare."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch.optim import Optimizer

from canzona_compile.compat.optimizer_class import plain_class
from canzona_compile.compat.telling import tell
from canzona_compile.errors import CanzonaError
from canzona_compile.ir.layout import Grid
from canzona_compile.ir.printer import show
from canzona_compile.ir.step import Step
from canzona_compile.kernels.tensor_args import tuned
from canzona_compile.runtime.channel import Channel, hash_of
from canzona_compile.runtime.equal_copies import Copy, Digest, difference, digests
from canzona_compile.runtime.meeting import Meeting, Purpose, meet_all
from canzona_compile.runtime.process_groups import Groups
from canzona_compile.runtime.store_agreement import StoreAgreement
from canzona_compile.runtime.waiter import Waiter

Ranks = tuple[int, ...]
NEWLY_SHARED = Purpose(
    "step()",
    "because its new plan shares matrices with them, and the plan before did not",
    "change parameters, gradients and hyperparameters in the same way on all ranks",
)


class RankAgreement:
    """Holds the agreements of all sets of ranks that this rank's parameters need.

    Every rank of a mesh must make the same calls in the same order.

    Args:
        groups: finds the process group of each agreement.
        device: the device of the parameters.
        optimizer: the optimizer, for messages.

    Attributes:
        waiter: waits for collectives and listens in all of them meanwhile.
    """

    def __init__(self, groups: Groups, device: torch.device, optimizer: Optimizer) -> None:
        self.groups, self.device, self.name = groups, device, f"optimizer ({plain_class(optimizer).__name__})"
        self._agreements: dict[Ranks, StoreAgreement] = {}
        self._channels: list[Channel] = []
        self.waiter = Waiter(self._channels, device)

    def report(self, members: Iterable[Ranks], error: CanzonaError | None, text: str = "") -> None:
        """Tell the ranks of every mesh whether an error kept this rank from planning. This is a collective.

        Raises:
            CanzonaError: one of these ranks could not make a plan, or their texts differ. All of them raise.
        """
        for ranks in sorted(r for r in members if len(r) > 1):
            error = self._agree(ranks, text, error)
        if error is not None:
            raise error

    def compare(
        self, owned: Step, options: str, present: Mapping[str, str], capacity: int = 0
    ) -> tuple[tuple[Ranks, int], ...]:
        """Compare plans, and which kernels compute them, among the ranks that run them together. This is a collective.

        A rank may hold further parameters on other meshes. So if there are several sets of ranks, each set compares
        only the tasks that its ranks share.

        Args:
            owned: the step of the plan, with owner ranks.
            options: the options as text.
            present: for each task, in the order of the plan, whether it has a gradient, as `StepDriver.begin` says it.
            capacity: the one that this rank proposes, in bytes; 0 for none.

        Returns:
            For each set of ranks, the least capacity that one of them proposes; empty if this rank proposes none.

        Raises:
            CanzonaError: the plans differ, or gradients are missing on some ranks only. All ranks of the set raise.
        """
        tell("comparing the plan with those of other ranks")
        grids = {t.layout.grid.members() for t in owned.tasks if t.layout.grid.size > 1}
        error: CanzonaError | None = None
        found: dict[Ranks, int] = {}
        for ranks in sorted(grids):
            own = [t for t in owned.tasks if t.layout.grid.members() == ranks]
            names = {t.name for t in own}
            here = {name: what for name, what in present.items() if name in names}
            bare = [name for name, what in here.items() if what.startswith("no gradient")]
            lines = [f"{options}\n{tuned(self.device)}", *(f"{name} has {what}" for name, what in here.items())]
            if len(own) == len(owned.tasks):
                lines.append(show(owned))
            else:
                lines += [f"{t.name} {list(t.shape)} {t.placed} {t.layout.placements} owner {t.owner}" for t in own]
            missing = f"no gradient for {', '.join(bare)}" if bare else "every gradient is there"
            try:
                found[ranks] = self._agreement_of(ranks).agree("\n".join(lines), error, missing, capacity)
            except CanzonaError as problem:  # for the next set, whose ranks may not be members of this one
                error = problem
        if error is not None:
            raise error
        return tuple(found.items()) if capacity else ()

    def compare_copies(self, copies: Sequence[Copy]) -> None:
        """Compare copies of parameters and gradients among the ranks that hold them. This is a collective.

        Raises:
            RankMismatch: ranks hold unequal copies. All ranks that share parameters with them raise.
        """
        own = digests(copies)
        error: CanzonaError | None = None
        for ranks in sorted({copy.grid.members() for copy in copies}):
            shared = [copy for copy in copies if copy.grid.members() == ranks]
            # Ranks of one column, and only those, have to agree: so a hash per grid, and all digests if they differ.
            mine = {copy.name: own[copy.name] for copy in shared}
            by_grid: dict[Grid, list[Digest]] = {}
            for copy in shared:
                by_grid.setdefault(copy.grid, []).append(own[copy.name])
            agreement = self._agreement_of(ranks)
            try:
                told = agreement.share(json.dumps([hash_of(str(values)) for values in by_grid.values()]), error)
            except CanzonaError as found_error:
                error = found_error
                continue
            answers = dict(zip(agreement.ranks, map(json.loads, told), strict=True))
            columns = [(i, column) for i, grid in enumerate(by_grid) for column in zip(*grid.ranks, strict=True)]
            if all(len({answers[r][i] for r in column}) == 1 for i, column in columns):
                continue
            texts = map(json.loads, agreement.share(json.dumps(mine)))
            found = {r: {n: Digest(*d) for n, d in t.items()} for r, t in zip(agreement.ranks, texts, strict=True)}
            error = difference(shared, found)
        if error is not None:
            raise error

    def _agree(self, ranks: Ranks, text: str, error: CanzonaError | None) -> CanzonaError | None:
        """Agree within one set of ranks and return the error that it raises, or None.

        The caller passes this error on to the next set, whose ranks may not be members of this one.
        """
        try:
            self._agreement_of(ranks).agree(text, error)
        except CanzonaError as found:
            return found
        return None

    def settle(
        self, ranks: Ranks, numbers: str, change: str, error: CanzonaError | None, others: str = ""
    ) -> CanzonaError | None:
        """Compare within one set of ranks, before a step, what its ranks found, see `StoreAgreement.compare`."""
        return self._agreement_of(ranks).compare(change, numbers, error, others)

    def meet(self, members: Iterable[Ranks]) -> None:
        """Wait for ranks that a new plan shares tasks with, and that did not announce one."""
        meet_all(dict.fromkeys(members, "a new plan"), self.meeting_of, NEWLY_SHARED)

    def meeting_of(self, ranks: Ranks) -> Meeting:
        """Return the meetings of some ranks."""
        return self._agreement_of(ranks).meeting

    def share(self, ranks: Ranks, text: str) -> list[str]:
        """Gather a text from every rank of a set, in the order of the ranks. This is a collective."""
        return self._agreement_of(ranks).share(text)

    def check(self) -> None:
        """Raise if an earlier call failed on its way, see `Channel.check`."""
        for agreement in self._agreements.values():
            agreement.channel.check()

    def fail(self, error: CanzonaError) -> None:
        """Tell all ranks that this rank raised an error on its way, so that no rank waits for it."""
        for channel in self._channels:
            channel.fail(error)

    def _agreement_of(self, ranks: Ranks) -> StoreAgreement:
        if ranks not in self._agreements:
            self._agreements[ranks] = StoreAgreement(ranks, self.groups.of(ranks), self.device, self.name)
            self._channels.append(self._agreements[ranks].channel)
        return self._agreements[ranks]
