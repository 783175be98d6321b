"""What a plan holds on to between steps, and users may replace: state, memory and attributes of parameters."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from canzona_compile.errors import CanzonaError, InvalidGradient
from canzona_compile.ir.layout import local_part
from canzona_compile.replica.leaves import CONTAINERS
from canzona_compile.replica.twin import any_attributes, plain_attributes

Entry = tuple[Callable[[Any], Any], Any, Any]  # the function that reads a container, a key in it, and the value there
REMOVED = object()
DTYPE, SHAPE = attrgetter("dtype"), attrgetter("shape")


class HeldState:
    """The tensors of `optimizer.state` that programs read and write.

    Args:
        optimizer: the optimizer.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.hold({})

    def hold(self, params: Mapping[str, Tensor]) -> None:
        """Note what these tasks have now.

        Args:
            params: the parameters by task; those that have no state yet are left out.
        """
        state = self.optimizer.state
        self._states: dict[str, tuple[Tensor, Any, list[Entry]]] = {
            name: (param, state[param], list(entries(state[param]))) for name, param in params.items() if param in state
        }
        self._params, self._owns = [p for p, _, _ in self._states.values()], [o for _, o, _ in self._states.values()]
        self._entries = [entry for _, _, own in self._states.values() for entry in own]
        self._sizes = list(map(len, self._owns))
        self._ids = ids_in(state)

    def cleared(self) -> list[str]:
        """Find the tasks whose state the user cleared, as a whole.

        Raises:
            CanzonaError: the user replaced or removed some of the state of a parameter, but not all.
        """
        if self._as_held():
            return []
        state, gone = self.optimizer.state, []
        for name, (param, own, held) in self._states.items():
            now = state.get(param)
            if now is own and in_place(held):
                continue
            if not now:
                gone.append(name)
                continue
            raise CanzonaError(
                "tensors in its state were replaced or removed, but the plan still uses the old ones",
                at=name,
                hint="change values in place, clear the whole state of the parameter, or call load_state_dict",
            )
        return gone

    def _as_held(self) -> bool:
        """Tell whether the user replaced nothing that is held. Each step asks this."""
        # Comparing identities in the order of the dict avoids hashing parameters: Tensor.__hash__ is a Python function.
        # The entries held here are alive, so their identities are their own. An entry that is not held may be a new
        # object with the identity of a freed one; it does not matter here.
        if (ids := ids_in(self.optimizer.state)) != self._ids:
            if not all(map(is_, map(self.optimizer.state.get, self._params), self._owns)):
                return False
            self._ids = ids
        return in_place(self._entries)

    def grown(self) -> bool:
        """Tell whether the user put new entries into the state of a parameter."""
        return list(map(len, self._owns)) != self._sizes


def ids_in(state: Mapping[Any, Any]) -> list[int]:
    """The identities of all keys, then of all values, in the order of the dict."""
    return [*map(id, state), *map(id, state.values())]


def entries(state: Any) -> Iterator[Entry]:
    """The tensors in the containers of a state."""
    for key, value in list(state.items()) if isinstance(state, dict) else list(enumerate(state)):
        if isinstance(value, Tensor | None):
            yield reader(state, value), key, value
        elif isinstance(value, CONTAINERS):
            yield from entries(value)


def reader(container: Any, value: Any) -> Callable[[Any], Any]:
    """Return what reads a container at a key, in C unless the value there is None, which dicts give for no entry."""
    if isinstance(container, dict):
        return container.get if value is not None else lambda key: container.get(key, REMOVED)
    read: Callable[[Any], Any] = container.__getitem__
    return read


def in_place(held: Iterable[Entry]) -> bool:
    """Tell whether these entries lie where they lay."""
    try:
        return all(read(key) is value for read, key, value in held)
    except IndexError:
        return False


class HeldParameters:
    """The memory and the marks of parameters, and the gradients of the last step.

    Args:
        params: the parameters, by name.
    """

    def __init__(self, params: Mapping[str, Tensor]) -> None:
        self.params = dict(params)
        self._distributed = any(isinstance(p, DTensor) for p in self.params.values())
        self._memory = self._memory_now()
        self._marks = self._marks_now()
        self._used: dict[str, weakref.ref[Tensor]] = {}

    def replaced(self) -> bool:
        """Tell whether the memory, the form or the marks of a parameter were replaced."""
        return self._memory_now() != self._memory or self._marks_now() != self._marks

    # These two run on each step, so they loop in C and only look at parameters that have attributes.

    def _memory_now(self) -> list[Any]:
        params = self.params.values()
        parts = [p._local_tensor if isinstance(p, DTensor) else p for p in params] if self._distributed else params
        return [*map(Tensor.data_ptr, parts), *map(DTYPE, parts), *map(SHAPE, parts)]

    def _marks_now(self) -> dict[str, str]:
        if not any_attributes(self.params.values()):
            return {}
        return {name: str(marks) for name, param in self.params.items() if (marks := plain_attributes(param))}

    def use_gradients(self, names: Iterable[str]) -> None:
        """Make NaN of the gradients of a step that writes them, as the plain optimizer leaves other values in them."""
        grads = {name: self.params[name].grad for name in names}
        self._used = {name: weakref.ref(grad) for name, grad in grads.items() if grad is not None}
        with torch.no_grad():
            for grad in grads.values():
                if grad is not None:
                    local_part(grad).fill_(float("nan"))

    def check_gradients(self) -> None:
        """Raise if a gradient that the last step used is there again, and was not zeroed.

        Raises:
            InvalidGradient: the optimizer writes gradients, and the next step would read what it wrote.
        """
        for name, used in self._used.items():
            grad = self.params[name].grad
            if grad is None or grad is not used():
                continue
            own = local_part(grad)
            if own.numel() and bool(own.flatten()[0].isnan()):
                raise InvalidGradient(
                    "the optimizer's step writes to gradients, and this gradient was not zeroed after the last step",
                    at=name,
                    hint="call zero_grad() after every step",
                )
