"""What the ranks of one optimizer compare: plans, copies of parameters, and the steps that they take."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch.optim import Optimizer

from canzona_compile.compat.optimizer_class import plain_class
from canzona_compile.compat.telling import tell
from canzona_compile.errors import CanzonaError
from canzona_compile.ir.layout import Grid, Ranks
from canzona_compile.ir.printer import show
from canzona_compile.ir.step import Step
from canzona_compile.kernels.tensor_args import tuned
from canzona_compile.runtime.agreement import PLANNING, Agreement, Details
from canzona_compile.runtime.channel import Channel, channel_of, hash_of
from canzona_compile.runtime.equal_copies import Copy, Digest, digests, unequal_copy
from canzona_compile.runtime.meeting import Meeting, Purpose, meet_all
from canzona_compile.runtime.process_groups import Groups
from canzona_compile.runtime.waiter import Waiter
from canzona_compile.session.params import flat_shards

NEWLY_SHARED = Purpose(
    "step()",
    "because its new plan shares matrices with them, and the plan before did not",
    "change parameters, gradients and hyperparameters in the same way on all ranks",
)


class Agreements:
    """The agreements of one optimizer, one for each set of ranks that its parameters need.

    Every rank of a set must make the same calls in the same order. An error of one set is told to the next one, whose
    ranks may not be members of this one.

    Args:
        device: the device of the parameters.

    Attributes:
        waiter: waits for collectives and listens in all of them meanwhile.
    """

    def __init__(self, groups: Groups, device: torch.device, optimizer: Optimizer) -> None:
        self.groups, self.device, self.name = groups, device, f"{plain_class(optimizer).__name__} optimizer"
        self._known: dict[Ranks, Agreement] = {}
        self._channels: list[Channel] = []
        self.waiter = Waiter(self._channels, device)

    def report(self, members: Iterable[Ranks], error: CanzonaError | None, text: str = "") -> None:
        """Tell the ranks of every mesh whether an error kept this rank from planning. This is a collective."""
        for ranks in sorted(r for r in members if len(r) > 1):
            try:
                self.of(ranks).compare(PLANNING, {"plan": text}, error)
            except CanzonaError as found:
                error = found
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
            present: for each task, in the order of the plan, whether it has a gradient, as `StepDriver.begin` says it.
            capacity: the one that this rank proposes, in bytes; 0 for none.

        Returns:
            For each set of ranks, the least capacity that one of them proposes; empty if this rank proposes none.
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
            details = {"present": missing, "plan": "\n".join(lines), "capacity": str(capacity)}
            try:
                told = self.of(ranks).compare(PLANNING, details, error)
                found[ranks] = min(int(other["capacity"]) for other in told)
            except CanzonaError as problem:
                error = problem
        if error is not None:
            raise error
        return tuple(found.items()) if capacity else ()

    def compare_copies(self, copies: Sequence[Copy]) -> None:
        """Compare copies of parameters and gradients among the ranks that hold them. This is a collective."""
        own = digests(copies)
        error: CanzonaError | None = None
        for ranks in sorted({copy.grid.members() for copy in copies}):
            shared = [copy for copy in copies if copy.grid.members() == ranks]
            # Ranks of one column, and only those, have to agree: so a hash per grid, and all digests if they differ.
            mine = {copy.name: own[copy.name] for copy in shared}
            by_grid: dict[Grid, list[Digest]] = {}
            for copy in shared:
                by_grid.setdefault(copy.grid, []).append(own[copy.name])
            agreement = self.of(ranks)
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
            error = unequal_copy(shared, found)
            if error is not None and all(copy.param.ndim == 1 for copy in shared):
                error = flat_shards([(copy.name, 0, copy.param) for copy in shared]) or error
        if error is not None:
            raise error

    def settle(
        self, ranks: Ranks, call: str, details: Details, error: CanzonaError | None
    ) -> tuple[CanzonaError | None, Sequence[Details]]:
        """Compare what the ranks of a set found before a step. `error` keeps this rank from taking it.

        Returns:
            The error that this rank has to raise; None if all ranks can take the step. And what each rank told.
        """
        agreement = self.of(ranks)
        try:
            return None, agreement.compare(call, details, error)
        except CanzonaError as verdict:
            assert agreement.channel is not None
            if agreement.channel.broken:
                raise
            return verdict, []

    def meet(self, members: Iterable[Ranks]) -> None:
        """Wait for ranks that a new plan shares tasks with, and that did not announce one."""
        meet_all(dict.fromkeys(members, "a new plan"), self.meeting_of, NEWLY_SHARED)

    def meeting_of(self, ranks: Ranks) -> Meeting:
        """Return the meetings of some ranks."""
        meeting = self.of(ranks).meeting
        assert meeting is not None
        return meeting

    def check(self) -> None:
        """Raise if an earlier call failed on its way, see `ErrorBoard.check`."""
        for channel in self._channels:
            channel.check()

    def fail(self, error: CanzonaError) -> None:
        """Tell all ranks that this rank raised an error on its way, so that no rank waits for it."""
        for channel in self._channels:
            channel.fail(error)

    def of(self, ranks: Ranks) -> Agreement:
        """The agreement of some ranks. If their channel is new, this is a collective of theirs."""
        if ranks not in self._known:
            channel = channel_of(ranks, self.groups.of(ranks), self.device)
            self._known[ranks] = Agreement(channel, self.name)
            self._channels.append(channel)
        return self._known[ranks]
