"""`round_state`: the plain optimizer whose state is rounded after each step, which `state=` is compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from canzona_compile.api.holders import inside, members_of
from canzona_compile.api.wrapped_class import is_wrapped
from canzona_compile.errors import CanzonaError
from canzona_compile.ir.options import Options
from canzona_compile.ir.storage import WHERE, StateOption, StateRules, rounded, rules_of
from canzona_compile.replica.leaves import storable_leaves
from canzona_compile.session.plan import StorageOf
from canzona_compile.session.session import Session


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
    members = members_of(inside(optimizer))
    for own in members:
        if not isinstance(own, Optimizer):
            raise CanzonaError(f"round_state takes a torch.optim.Optimizer, not a {type(own).__name__}")
        if is_wrapped(own):
            raise CanzonaError(
                "the optimizer is wrapped, and its state lies in fragments",
                hint="round the state of the plain optimizer, and pass state= to wrap",
            )
    roundings = {own: rounding(own, rules) for own in members}

    def after(own: Optimizer, *_: Any) -> None:
        roundings[own]()

    return StateRounding([own.register_step_post_hook(after) for own in members])


def rounding(optimizer: Optimizer, rules: StateRules) -> Callable[[], None]:
    """Return what rounds the state that an optimizer has, in place."""
    storages = Storages(optimizer, rules)

    def round_all() -> None:
        for param, held in optimizer.state.items():
            for name, value in storable_leaves(held).values() if isinstance(param, Tensor) else ():
                if (storage := storages.of(param)(name, value.dtype)) is not None:
                    value.copy_(rounded(value, storage))

    return round_all


class Storages:
    """Finds the storages of a parameter's leaves. For one text for all leaves it captures the step."""

    def __init__(self, optimizer: Optimizer, rules: StateRules) -> None:
        self.optimizer, self.rules = optimizer, rules
        self._known: dict[int, StorageOf] = {}

    def of(self, param: Tensor) -> StorageOf:
        """Return what tells how leaves of this parameter are stored."""
        if not self.rules.lenient:
            return self.rules.of
        if id(param) not in self._known:  # the first one, or one that was added
            session = Session(self.optimizer, Options(state=self.rules))
            plan = session.plan_bound(session.bind_all())
            self._known = {id(bound.param): plan.storages(bound.task.name) for bound in plan.bound.values()}
        return self._known.setdefault(id(param), lambda *_: None)
