"""`round_state`: the plain optimizer whose state is rounded after each step, which `state=` is compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from canzona_compile.api.holders import inside, members_of
from canzona_compile.errors import CanzonaError
from canzona_compile.ir.options import Options
from canzona_compile.ir.storage import WHERE, StateOption, StateRules, Storage, rounded, rules_of, storable
from canzona_compile.replica.leaves import state_leaves
from canzona_compile.session.session import Session
from canzona_compile.tensors import local_part

StorageOf = Callable[[str], Storage | None]  # by the name of a leaf


@dataclass(frozen=True, slots=True)
class StateRounding:
    """Rounds the state of plain optimizers after each of their steps, until it is removed."""

    handles: Sequence[RemovableHandle]

    def remove(self) -> None:
        """Round no more."""
        for handle in self.handles:
            handle.remove()


def round_state(optimizer: Optimizer, state: StateOption) -> StateRounding:
    """Round the state of a plain optimizer after each of its steps, in place.

    `wrap(optimizer, state=...)` takes the same steps, with state that is stored so, on any layout.

    Args:
        optimizer: an optimizer of whole parameters, or a chain of such, that is not wrapped.
        state: as in `wrap`. "cpu" rounds nothing.

    Returns:
        What ends it, by its `remove()`.

    Raises:
        CanzonaError: `state` is none of what `wrap` takes.
    """
    rules = rules_of(state)
    if rules is None:
        raise CanzonaError("round_state takes what wrap(state=) takes, not None", at=WHERE)
    roundings = {own: rounding(own, rules) for own in members_of(inside(optimizer))}

    def after(own: Optimizer, *_: Any) -> None:
        roundings[own]()

    return StateRounding([own.register_step_post_hook(after) for own in roundings])


def rounding(optimizer: Optimizer, rules: StateRules) -> Callable[[], None]:
    """Return what rounds the state that an optimizer has, in place."""
    storages = storages_of(optimizer, rules)

    def round_all() -> None:
        for param, held in optimizer.state.items():
            storage_of = storages(param)
            for name, value in state_leaves(held):
                storage = storage_of(name)
                if storage is not None and isinstance(value, Tensor) and storable(value.shape, value.dtype):
                    local = local_part(value)
                    local.copy_(rounded(local, storage))

    return round_all


def storages_of(optimizer: Optimizer, rules: StateRules) -> Callable[[Tensor], StorageOf]:
    """Return what finds the storages of a parameter's leaves. For one text for all leaves the step is captured."""
    if not rules.lenient:
        return lambda _: rules.of
    plan = Session(optimizer, Options(state=rules)).bind_and_plan()
    found = {id(bound.param): plan.storages(bound.task.name) for bound in plan.bound.values()}
    return lambda param: found.get(id(param), lambda _: None)
