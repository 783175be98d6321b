"""Portable state between steps: which ranks its gathering needs, and what `consolidate` keeps of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch.optim import Optimizer

from canzona_compile.ir.step import Task
from canzona_compile.runtime.meeting import Purpose
from canzona_compile.session.state import StateStore, restoring

Ranks = tuple[int, ...]


class Consolidated(NamedTuple):
    """Portable state that one rank keeps until the next step.

    Attributes:
        to: the global rank that keeps it.
        state: what `optimizer.state` holds in portable form; None on all other ranks.
    """

    to: int
    state: dict[Any, Any] | None


def gathering(call: str) -> Purpose:
    """Say for what ranks meet that gather portable state.

    Args:
        call: the call that needs it.
    """
    return Purpose(
        call,
        "because some of the state lies on owner ranks",
        "call it on all ranks; to save on rank 0 alone, call optimizer.canzona.consolidate(to=0) on all ranks before",
    )


def partners(store: StateStore) -> dict[Ranks, str]:
    """Find the ranks with which `store.release()` communicates.

    Args:
        store: the state of a plan.

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
    for fused in store.plan.fused:
        own = [tasks[id(param)] for param in fused.params if id(param) in tasks]
        alike = [{leaf.name for leaf in store.leaves(t.name) if leaf.shape == t.shape} for t in own]
        named = {leaf.name for t in own for leaf in store.leaves(t.name) if leaf.shape}
        if any(named - names for names in alike):
            found |= {t.name for t in own if t.layout.grid.shards > 1}
    return found


@contextlib.contextmanager
def shown(optimizer: Optimizer, state: dict[Any, Any]) -> Iterator[None]:
    """Let `optimizer.state` hold other state inside this context.

    Args:
        optimizer: the optimizer.
        state: what it holds meanwhile.
    """
    with restoring(optimizer):
        optimizer.state.clear()
        optimizer.state.update(state)
        yield
