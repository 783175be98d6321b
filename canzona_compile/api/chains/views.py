"""What a chain shows of its optimizers: their parameter groups and their state."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, MutableMapping
from typing import Any, NoReturn, Protocol

from torch.optim import Optimizer

from canzona_compile.errors import CanzonaError


class Members(Protocol):
    """What the views ask of a chain."""

    optimizers: tuple[Optimizer, ...]

    def holder(self, param: Any) -> Optimizer | None: ...


class FixedGroups(list[dict[str, Any]]):
    """The parameter groups of a chain. A group that is put into this list would reach no optimizer, so none can be."""

    def _fixed(self, *_: Any, **__: Any) -> NoReturn:
        raise CanzonaError(
            "param_groups of a chain is a read-only view of the groups of its optimizers",
            at="chain.param_groups",
            hint="add a group with chain.add_param_group(group, to=...), or change chain.optimizers[i].param_groups",
        )

    append = extend = insert = remove = pop = clear = sort = reverse = _fixed
    __setitem__ = __delitem__ = __iadd__ = __imul__ = _fixed

    def __reduce__(self) -> Any:  # a copy is a list like any other
        return list, (list(self),)


class ChainState(MutableMapping[Any, Any]):
    """The state of all optimizers of a chain, by parameter: a view, which writes to where the parameter belongs.

    Args:
        own: the chain.
    """

    def __init__(self, own: Members) -> None:
        self._chain = own

    @property
    def _states(self) -> list[MutableMapping[Any, Any]]:
        return [optimizer.state for optimizer in self._chain.optimizers]

    def _home(self, key: Any) -> MutableMapping[Any, Any]:
        for state in self._states:
            if key in state:
                return state
        holder = self._chain.holder(key)
        if holder is None:
            raise KeyError(key)
        return holder.state

    def __getitem__(self, key: Any) -> Any:
        return self._home(key)[key]  # where there is none yet, an optimizer makes an empty one

    def __setitem__(self, key: Any, value: Any) -> None:
        self._home(key)[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._home(key)[key]

    def get(self, key: Any, default: Any = None) -> Any:
        """The state of a parameter, or the default; it makes no empty one."""
        return self[key] if key in self else default  # noqa: SIM401 - this is get

    def setdefault(self, key: Any, default: Any = None) -> Any:
        """The state of a parameter; the default becomes it if there is none."""
        if key not in self:
            self[key] = default
        return self[key]

    def pop(self, key: Any, *default: Any) -> Any:
        """Drop the state of a parameter, and return it."""
        return self._home(key).pop(key, *default) if key in self or not default else default[0]

    def __contains__(self, key: object) -> bool:
        return any(key in state for state in self._states)

    def __iter__(self) -> Iterator[Any]:
        for state in self._states:
            yield from state

    def __len__(self) -> int:
        return sum(map(len, self._states))

    def clear(self) -> None:
        """Drop the state of all optimizers."""
        for state in self._states:
            state.clear()

    def __deepcopy__(self, memo: dict[int, Any]) -> defaultdict[Any, Any]:
        return defaultdict(dict, copy.deepcopy(dict(self), memo))

    def __reduce__(self) -> Any:
        return dict, (dict(self),)

    def __repr__(self) -> str:
        return f"ChainState({dict(self)!r})"
