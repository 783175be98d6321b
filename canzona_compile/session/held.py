"""What a plan holds on to between steps, and users may replace: state, memory and attributes of parameters."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from canzona_compile.errors import CanzonaError, InvalidGradient
from canzona_compile.ir.layout import local_part
from canzona_compile.replica.leaves import CONTAINERS
from canzona_compile.replica.twin import plain_attributes

Entry = tuple[Any, Any, Any]  # a container, a key, and what lies there
REMOVED = object()


class HeldState:
    """The tensors of `optimizer.state` that programs read and write.

    Args:
        optimizer: the optimizer.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._states: dict[str, tuple[Tensor, Any, list[Entry]]] = {}
        self._sizes: dict[str, int] = {}

    def hold(self, params: Mapping[str, Tensor]) -> None:
        """Note what these tasks have now.

        Args:
            params: the parameters by task; those that have no state yet are left out.
        """
        state = self.optimizer.state
        self._states = {
            name: (param, state[param], list(entries(state[param]))) for name, param in params.items() if param in state
        }
        self._sizes = {name: len(own) for name, (_, own, _) in self._states.items()}

    def cleared(self) -> list[str]:
        """Find the tasks whose state the user cleared, as a whole.

        Raises:
            CanzonaError: the user replaced or removed some of the state of a parameter, but not all.
        """
        state, gone = self.optimizer.state, []
        for name, (param, own, held) in self._states.items():
            now = state.get(param)
            if now is own and all(read_at(container, key) is value for container, key, value in held):
                continue
            if not now:
                gone.append(name)
                continue
            raise CanzonaError(
                "tensors of its state were replaced or removed, which the plan has taken over",
                at=name,
                hint="change their values in place, clear the whole state, or go through load_state_dict",
            )
        return gone

    def grown(self) -> bool:
        """Tell whether the user put new entries into the state of a parameter."""
        return any(len(own) != self._sizes[name] for name, (_, own, _) in self._states.items())


def entries(state: Any) -> Iterator[Entry]:
    """The tensors in the containers of a state."""
    for key, value in list(state.items()) if isinstance(state, dict) else list(enumerate(state)):
        if isinstance(value, Tensor | None):
            yield state, key, value
        elif isinstance(value, CONTAINERS):
            yield from entries(value)


def read_at(container: Any, key: Any) -> Any:
    """What a dict has under a key, or a sequence at an index; a mark of its own if it has nothing there."""
    if isinstance(container, dict):
        return container.get(key, REMOVED)
    return container[key] if key < len(container) else REMOVED


class HeldParameters:
    """The memory and the marks of parameters, and the gradients of the last step.

    Args:
        params: the parameters, by name.
    """

    def __init__(self, params: Mapping[str, Tensor]) -> None:
        self.params = dict(params)
        self._memory = self._addresses()
        self._marks = self._all_marks()
        self._used: dict[str, weakref.ref[Tensor]] = {}

    def replaced(self) -> bool:
        """Tell whether memory or marks of a parameter were replaced."""
        return self._addresses() != self._memory or self._all_marks() != self._marks

    def _addresses(self) -> list[tuple[int, torch.dtype]]:
        parts = [local_part(param) for param in self.params.values()]
        return [(part.data_ptr(), part.dtype) for part in parts]

    def _all_marks(self) -> list[dict[str, Any]]:
        return [plain_attributes(param) for param in self.params.values()]

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
                    "the optimizer's step writes gradients, on copies, and this one was not zeroed since",
                    at=name,
                    hint="call zero_grad() after every step",
                )
