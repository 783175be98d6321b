"""Portable state between the steps of a session: what the unwrapped optimizer would hold."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch.optim import Optimizer

from canzona_compile.errors import CanzonaError
from canzona_compile.runtime.meeting import Meeting, meet_all
from canzona_compile.runtime.process_groups import current_device
from canzona_compile.runtime.rank_agreement import RankAgreement
from canzona_compile.session.gathered import Consolidated, Ranks, gathering, partners, shown
from canzona_compile.session.siblings import Siblings
from canzona_compile.session.step_driver import StepDriver


class PortableState:
    """The part of a session that gathers portable state; `Session` has its attributes."""

    optimizer: Optimizer
    driver: StepDriver | None
    siblings: Siblings | None
    _agreement: RankAgreement | None
    _consolidated: Consolidated | None

    @property
    def rank(self) -> int:
        raise NotImplementedError

    @property
    def device(self) -> torch.device:
        raise NotImplementedError

    def _check_unbroken(self) -> None:
        raise NotImplementedError

    def meet(self, purpose: str) -> None:
        """Wait until all ranks have come with which this rank gathers portable state; not at all if there are none.

        Args:
            purpose: the call that needs them, for messages.

        Raises:
            CanzonaError: a rank did not come in time, or failed.
        """
        told = self.partners()
        if told:
            self._check_unbroken()
            meet_all(told, self.meeting_of, gathering(purpose))

    def meeting_of(self, ranks: Ranks) -> Meeting:
        """Return the meetings of some ranks with which this rank shares state."""
        assert self._agreement is not None
        return self._agreement.meeting_of(ranks)

    def sharing(self) -> dict[Ranks, Callable[[str], list[str]]]:
        """Find the sets of ranks that this rank shares tasks with, and what gathers a text from all ranks of each.

        In a chain, those with which any of its optimizers does: an elementwise one shares none by itself.
        """
        assert self._agreement is not None
        drivers = [self.driver] if self.siblings is None else self.siblings.drivers
        found = [ranks for driver in drivers if driver is not None for ranks in driver.numbers()]
        return {ranks: partial(self._agreement.share, ranks) for ranks in dict.fromkeys(found)}

    def partners(self) -> dict[Ranks, str]:
        """Find the sets of ranks that portable state is gathered from, and what each gathers, as text."""
        return {} if self.driver is None else partners(self.driver.store)

    def consolidate(self, to: int) -> None:
        """Gather portable state, so that one rank has it without the others until the next step. A collective.

        Args:
            to: the global rank that keeps it.

        Raises:
            CanzonaError: a rank does not call this, too.
        """
        self._consolidated = None
        if not self.partners():  # every rank has its portable state already
            return
        with self.portable_state(f"consolidate(to={to})"):
            self._consolidated = Consolidated(to, dict(self.optimizer.state) if self.rank == to else None)

    @contextlib.contextmanager
    def portable_state(self, purpose: str = "state_dict()") -> Iterator[None]:
        """Inside this context, `optimizer.state` holds what the unwrapped optimizer would hold.

        Entering it is a collective if owners hold state, unless `consolidate` came before.

        Args:
            purpose: the call that needs it, for messages.

        Raises:
            CanzonaError: a rank that this needs does not make this call, too, or another rank has the state.
        """
        kept = self._consolidated
        if kept is None:
            self.meet(purpose)
            with self.gathered_state():
                yield
        elif kept.state is not None:
            with shown(self.optimizer, kept.state):
                yield
        else:
            raise CanzonaError(
                f"{purpose} on rank {self.rank}, but the state was consolidated to rank {kept.to}",
                hint="make this call on that rank alone, or on all ranks without consolidate",
            )

    @contextlib.contextmanager
    def gathered_state(self) -> Iterator[None]:
        """Inside this context, `optimizer.state` is portable. Entering it is a collective if owners hold state."""
        with contextlib.ExitStack() as stack:
            if self.driver is not None:
                with current_device(self.device):
                    stack.enter_context(self.driver.store.shown_portably())
            yield
