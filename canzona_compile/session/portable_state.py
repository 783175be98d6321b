"""Portable state: what the unwrapped optimizer would hold. Which ranks it is gathered from, and what shows it.

Checkpoints read it between the steps of a session. A plan takes it over before its first step, and gives it back if
there is no such step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from canzona_compile.compat.optimizer_class import HeldOptimizer, plain_class
from canzona_compile.compat.torch_private import pytree
from canzona_compile.eager.own_object import is_portable
from canzona_compile.errors import CanzonaError
from canzona_compile.ir.layout import Ranks
from canzona_compile.ir.step import Task
from canzona_compile.replica.raised import failed_on
from canzona_compile.runtime.meeting import Meeting, Purpose, meet_all
from canzona_compile.runtime.process_groups import current_device, distributed
from canzona_compile.session.agreements import Agreements
from canzona_compile.session.state import StateStore, restoring
from canzona_compile.session.step_driver import StepDriver
from canzona_compile.session.turns import Turns
from canzona_compile.views.pieces import PiecesView


class Consolidated(NamedTuple):
    """Portable state that one rank keeps until the next step.

    Attributes:
        state: what `optimizer.state` holds in portable form; None on all other ranks.
    """

    to: int
    state: dict[Any, Any] | None


def gathering(call: str) -> Purpose:
    """Say for what ranks meet that gather portable state."""
    return Purpose(
        call,
        "because owner ranks hold some of the state",
        "call it on all ranks; to save on rank 0 only, first call optimizer.canzona.consolidate(to=0) on all ranks",
    )


def partners(store: StateStore) -> dict[Ranks, str]:
    """Find the ranks with which `store.release()` communicates.

    Returns:
        By set of ranks, the names of the tasks whose state travels between them, one per line. All of these ranks find
        the same.
    """
    found: dict[Ranks, list[str]] = {}
    fused = unlike_pieces(store)
    for task in store.plan.owned.tasks:
        if task.layout.grid.size > 1 and (travels(store, task) or task.name in fused):
            found.setdefault(task.layout.grid.members(), []).append(task.name)
    return {ranks: "\n".join(names) for ranks, names in found.items()}


def travels(store: StateStore, task: Task) -> bool:
    """Tell whether the owner of a task sends state to the other ranks when the state becomes portable."""
    if task.owner is None or task.name not in store.initialised or store.cleared(task):
        return False
    interpreted = store.plan.bound[task.name].kind.recorder is None
    return interpreted or any(store.is_resident(leaf, task.name) for leaf in store.leaves(task.name))


def unlike_pieces(store: StateStore) -> set[str]:
    """Find the pieces of fused parameters with leaves that cannot be joined as fragments, so that they are gathered."""
    found: set[str] = set()
    tasks = {id(store.params[task.name]): task for task in store.plan.owned.tasks}
    for view in store.plan.views:
        own = [tasks[id(param)] for param in view.params if id(param) in tasks] if isinstance(view, PiecesView) else []
        alike = [{leaf.name for leaf in store.leaves(t.name) if leaf.shape == t.shape} for t in own]
        named = {leaf.name for t in own for leaf in store.leaves(t.name) if leaf.shape}
        if any(named - names for names in alike):
            found |= {t.name for t in own if t.layout.grid.shards > 1}
    return found


@contextlib.contextmanager
def given_back_on_error(optimizer: Optimizer, end: Callable[[BaseException], None]) -> Iterator[None]:
    """If anything ends this context early, give the optimizer the state that it has now, and put back what was lent.

    This needs no other rank, so it works whichever ranks fail. The tensors of the state must not be written inside.
    They stay alive until the end, beside those that owners gather from them.
    """
    kept = [(param, own, pytree.tree_map(lambda leaf: leaf, own)) for param, own in optimizer.state.items()]
    try:
        yield
    except BaseException as error:
        optimizer.state.clear()
        for param, own, content in kept:
            if isinstance(own, dict):
                own.clear()
                own.update(content)
            optimizer.state[param] = own
        end(error)
        raise


class PortableState:
    """The part of a session that gathers portable state from the ranks that hold it.

    Attributes:
        driver: takes the steps of the current plan; None before the first step and after `release`.
        turns: lets one call at a time work on the optimizer; those of a chain share it.
    """

    optimizer = HeldOptimizer()

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.driver: StepDriver | None = None
        self.turns = Turns()
        self._agreements: Agreements | None = None
        self._consolidated: Consolidated | None = None

    @property
    def rank(self) -> int:
        """The global rank of this process; 0 without a default process group."""
        return dist.get_rank() if distributed() else 0

    @property
    def device(self) -> torch.device:
        """The device of the parameters; the CPU if there are none."""
        params = (param for group in self.optimizer.param_groups for param in group["params"])
        return next((param.device for param in params), torch.device("cpu"))

    def meet(self, purpose: str) -> None:
        """Wait until all ranks have come with which this rank gathers portable state; not at all if there are none."""
        told = self.partners()
        if told:
            self.turns.check_thread(purpose)
            if self._agreements is not None:
                self._agreements.check()
            meet_all(told, self.meeting_of, gathering(purpose))

    def meeting_of(self, ranks: Ranks) -> Meeting:
        """Return the meetings of some ranks with which this rank shares state."""
        assert self._agreements is not None
        return self._agreements.meeting_of(ranks)

    @contextlib.contextmanager
    def telling(self, driver: StepDriver | None = None) -> Iterator[None]:
        """Inside this context, ranks communicate. An error ends that for good, and the others hear of it."""
        try:
            yield
        except BaseException as error:  # an interrupt leaves other ranks waiting as well
            driver = driver or self.driver
            if driver is not None and driver.shares and self._agreements is not None:
                self._agreements.fail(failed_on(self.rank, error))
            raise

    def partners(self) -> dict[Ranks, str]:
        """Find the sets of ranks that portable state is gathered from, and what each gathers, as text."""
        return {} if self.driver is None else partners(self.driver.store)

    @property
    def has_objects(self) -> bool:
        """Whether it has stepped by optimizer objects of its own."""
        driver = self.driver
        return driver is not None and any(driver.plan.bound[n].kind.maker for n in driver.store.initialised)

    def check_taken_back(self) -> None:
        """Raise if the optimizer cannot go on from its portable state by itself."""
        states = self.optimizer.state.values()
        if self.has_objects or any(isinstance(own, dict) and is_portable(own) for own in states):
            raise CanzonaError(
                f"{plain_class(self.optimizer).__name__} ran as one optimizer object per matrix, and what those "
                "objects keep cannot be merged back into one plain optimizer",
                at="unwrap",
                hint="continue with the wrapped optimizer, or start again with the plain one",
            )

    def consolidate(self, to: int) -> None:
        """Gather portable state, so that one rank has it without the others until the next step. A collective."""
        self._consolidated = None
        if not self.partners():  # every rank already has its portable state
            return
        with self.portable_state(f"consolidate(to={to})"):
            self._consolidated = Consolidated(to, dict(self.optimizer.state) if self.rank == to else None)

    @contextlib.contextmanager
    def portable_state(self, purpose: str = "state_dict()") -> Iterator[None]:
        """Inside this context, `optimizer.state` holds what the unwrapped optimizer would hold.

        Entering it is a collective if owners hold state, unless `consolidate` came before.
        """
        with self.turns.take(purpose):
            kept = self._consolidated
            if kept is None:
                self.meet(purpose)
                with self.gathered_state():
                    yield
                return
            if kept.state is not None:
                with restoring(self.optimizer):
                    self.optimizer.state.clear()
                    self.optimizer.state.update(kept.state)
                    yield
                return
        raise CanzonaError(
            f"{purpose} was called on rank {self.rank}, but the state was consolidated to rank {kept.to}",
            hint="call it on that rank only, or on all ranks without consolidate",
        )

    @contextlib.contextmanager
    def gathered_state(self) -> Iterator[None]:
        """Inside this context, `optimizer.state` is portable. Entering it is a collective if owners hold state."""
        if self.driver is None:
            yield
            return
        with restoring(self.optimizer):
            with current_device(self.device):
                self.driver.store.release()
            yield
