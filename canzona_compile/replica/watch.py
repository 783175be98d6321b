"""What users may change between two steps: attributes of an optimizer, its parameters, the state that a plan holds."""

from __future__ import annotations

import collections
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from operator import attrgetter, is_
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from canzona_compile.compat.optimizer_class import HeldOptimizer
from canzona_compile.errors import CanzonaError, UnsupportedOptimizer, some
from canzona_compile.ir.storage import Stored
from canzona_compile.replica.homes import own_attributes
from canzona_compile.replica.leaves import CONTAINERS
from canzona_compile.replica.snapshot import ATOMS, Contents, Snapshot, changed
from canzona_compile.tensors import any_attributes, made_of, memory_of, other_attributes, plain_attributes

MOST_REHEARSALS = 3  # for changes of one attribute: one that changes on every step, such as a log, must not cost more
A_DICT = ("a dict",)  # stands before the entries of a dict in a list; a tuple, so that it counts as a constant
MOST_WATCHED = 1000  # places in the attributes of an optimizer; looking at them costs time on every step
MOST_OF_PARAMETER = 100  # places in the attributes of one parameter
OF_PARAMETERS = "parameters' "  # places in attributes of parameters begin with it
DTYPE, SHAPE = attrgetter("dtype"), attrgetter("shape")

Entry = tuple[Callable[[Any], Any], Any, Any]  # the function that reads a container, a key in it, and the value there


class ChangeWatch:
    """Compares what an optimizer has now with the last look, and with what the plan holds.

    Every step asks all of this, so each question has a shortcut in C for the answer that nothing changed.

    Args:
        own_objects: whether owner ranks have an optimizer object per matrix. These follow parameter groups and the
            memory of parameters, wherever else the optimizer holds them.
    """

    optimizer = HeldOptimizer()

    def __init__(self, optimizer: Optimizer, own_objects: bool = False) -> None:
        self.optimizer, self.own_objects = optimizer, own_objects
        self._last: Contents | None = None
        self._constants: list[Any] | None = None  # what the last look saw; None if not all of it was constant
        self._changes: collections.Counter[str] = collections.Counter()  # by name, those that twins do not follow
        self._deep: list[str] = []  # the places inside of attributes that changed

    # -- attributes, since the last look ---------------------------------------------------------------

    def begin(self, counters: Container[str]) -> None:
        """Look at attributes for the first time, except for those in which the step counts."""
        if self._last is None:
            self._last = self._look(counters)

    def changes(self, counters: Container[str]) -> tuple[bool, bool]:
        """Look at attributes again. Numbers and texts of parameters belong to plans, see `replaced`.

        Returns:
            Whether an attribute of the optimizer changed since the last look; whether the optimizer should be rehearsed
            again, because something changed that has not changed often. Numbers in attributes of the optimizer reach
            twins, so they do not count. Those inside of attributes of parameters do not reach them.
        """
        if self._as_before(counters):
            return False, False
        now, before = self._look(counters), self._last or {}
        places = [] if self._last is None else changed(before, now)
        places = [place for place in places if name_of(place) not in counters and not grown_by_torch(place, before)]
        self._last = now
        of_optimizer = [place for place in places if not place.startswith(OF_PARAMETERS)]
        own = vars(self.optimizer)
        plain = {name for name, value in own.items() if isinstance(value, ATOMS)}  # which own objects get
        self._deep += [p for p in of_optimizer if p not in plain and not p.startswith("defaults")]
        unfollowed = [p for p in places if p.startswith(OF_PARAMETERS) or not is_number(now.get(p))]
        names = {name_of(place) for place in unfollowed}
        self._changes.update(names)
        return bool(of_optimizer), any(self._changes[name] <= MOST_REHEARSALS for name in names)

    def check_followed(self) -> None:
        """Raise if own objects cannot follow what changed. They get attributes that are plain values, and no others."""
        if self.own_objects and self._deep:
            places = some(f"self.{place}" for place in self._deep)
            raise UnsupportedOptimizer(
                f"{places} changed after the optimizer was built, but the optimizer objects of owner ranks do not "
                "see it",
                hint="change only hyperparameters, and attributes that are numbers or strings",
            )

    def _as_before(self, counters: Container[str]) -> bool:
        """Tell whether all attributes are constants, and the same objects as in the last look."""
        before, now = self._constants, flattened_attributes(self.optimizer, counters)
        same = before is not None and len(now) == len(before) and all(map(is_, now, before))
        return same and not any_attributes(self._all_params())

    def _all_params(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def _look(self, counters: Container[str]) -> Contents:
        own = self.optimizer
        followed = {id(own), *(map(id, own.param_groups) if self.own_objects else ())}
        memory = memory_of(*self._all_params()) if self.own_objects else set()

        def label(value: Any) -> str | None:
            if id(value) in followed or (memory and not memory.isdisjoint(memory_of(value))):
                return "followed"
            return by_identity(value)

        walk = Snapshot(label, bits=False, most=MOST_WATCHED)
        for name, value in own_attributes(own).items():
            if name not in counters:
                walk.add(name, value)
        found = walk.found
        held, params = flattened_attributes(own, counters), self._all_params()
        marked = any_attributes(params)
        self._constants = held if not marked and all(map(is_constant, held)) else None
        for i, param in enumerate(params if marked else ()):
            if odd := other_attributes(param):
                walk = Snapshot(by_form, bits=False, most=MOST_OF_PARAMETER)
                for name, value in odd.items():
                    walk.add(f"{OF_PARAMETERS}{name}[{i}]", value)
                found |= walk.found
        return found

    # -- parameters and state, since the plan ------------------------------------------------------------

    def hold(self, params: Mapping[str, Tensor]) -> None:
        """Note the memory, the form and the marks that the parameters of a plan have now, by name."""
        self._params = dict(params)
        kinds = {type(p._local_tensor) if isinstance(p, DTensor) else type(p) for p in self._params.values()}
        self._distributed = any(isinstance(p, DTensor) for p in self._params.values())
        self._odd = any(hasattr(kind, "__tensor_flatten__") for kind in kinds)
        self._memory, self._marks = self._memory_now(), self._marks_now()
        self.hold_state({})

    def replaced(self) -> bool:
        """Tell whether the memory, the form or the marks of a parameter were replaced."""
        return self._memory_now() != self._memory or self._marks_now() != self._marks

    def _memory_now(self) -> list[Any]:
        parts: Iterable[Tensor] = self._params.values()
        if self._odd:
            parts = [own for param in parts for own in made_of(param)]
        elif self._distributed:
            parts = [p._local_tensor if isinstance(p, DTensor) else p for p in parts]
        return [*map(Tensor.data_ptr, parts), *map(DTYPE, parts), *map(SHAPE, parts)]

    def _marks_now(self) -> dict[str, str]:
        if not any_attributes(self._params.values()):
            return {}
        return {name: str(marks) for name, param in self._params.items() if (marks := plain_attributes(param))}

    def hold_state(self, params: Mapping[str, Tensor]) -> None:
        """Note the tensors in the state of these tasks, which programs read and write from now on."""
        state = self.optimizer.state
        self._states: dict[str, tuple[Tensor, Any, list[Entry]]] = {
            name: (param, state[param], list(entries(state[param]))) for name, param in params.items() if param in state
        }
        self._stateful, self._owns = [p for p, _, _ in self._states.values()], [o for _, o, _ in self._states.values()]
        self._entries = [entry for _, _, own in self._states.values() for entry in own]
        self._sizes = list(map(len, self._owns))
        self._ids = ids_in(state)

    def cleared(self) -> list[str]:
        """Find the tasks whose state the user cleared, as a whole."""
        if self._as_held():
            return []
        state, gone = self.optimizer.state, []
        for name, (param, own, held) in self._states.items():
            now = state.get(param)
            if now is own and in_place(held):
                continue
            if now:
                raise CanzonaError(
                    "tensors in its state were replaced or removed, but the plan still uses the old ones",
                    at=name,
                    hint="change values in place, clear the whole state of the parameter, or call load_state_dict",
                )
            gone.append(name)
        return gone

    def _as_held(self) -> bool:
        """Tell whether the user replaced nothing in the state that is held."""
        # Comparing identities in the order of the dict avoids hashing parameters: Tensor.__hash__ is a Python function.
        # The entries held here are alive, so their identities are their own. An entry that is not held may be a new
        # object with the identity of a freed one; it does not matter here.
        if (ids := ids_in(self.optimizer.state)) != self._ids:
            if not all(map(is_, map(self.optimizer.state.get, self._stateful), self._owns)):
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
    """The tensors in the containers of a state, and what stands for those of other ranks."""
    for key, value in list(state.items()) if isinstance(state, dict) else list(enumerate(state)):
        if isinstance(value, Tensor | Stored | None):
            yield state.get if isinstance(state, dict) else state.__getitem__, key, value
        elif isinstance(value, CONTAINERS):
            yield from entries(value)


def in_place(held: Iterable[Entry]) -> bool:
    """Tell whether these entries lie where they lay."""
    try:
        return all(read(key) is value for read, key, value in held)
    except IndexError:
        return False


def flattened_attributes(optimizer: Optimizer, counters: Container[str]) -> list[Any]:
    """The names and values of the attributes except counters, in one list. A dict is replaced by its entries."""
    found: list[Any] = []
    for name, value in own_attributes(optimizer).items():
        if name not in counters:
            found += (name, A_DICT, len(value), *value, *value.values()) if type(value) is dict else (name, value)
    return found


def is_constant(value: Any) -> bool:
    """Tell whether a value cannot change, so that the same object means the same value."""
    return type(value) in ATOMS or (type(value) is tuple and all(map(is_constant, value)))


def grown_by_torch(place: str, before: Contents) -> bool:
    """Whether a place is an entry that came to the defaults, or their number: torch adds some when state is loaded."""
    return place == "defaults" or (place.startswith("defaults[") and place not in before)


def name_of(place: str) -> str:
    """The attribute that a place is in; for attributes of parameters the place, which is the same for all of them."""
    return re.sub(r"\d+", "", place) if place.startswith(OF_PARAMETERS) else re.split(r"[.\[]", place)[0]


def by_identity(value: Any) -> str | None:
    """Name modules and parameters, whose values change on every step."""
    if isinstance(value, nn.Module):
        return f"module {id(value)} training={value.training}"
    return f"parameter {id(value)}" if isinstance(value, nn.Parameter) else None


def by_form(value: Any) -> str | None:
    """Name modules, and tensors by what is seen of them without their values, which may change on every step."""
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else by_identity(value)


def is_number(found: Any) -> bool:
    """Tell whether what a `Snapshot` found at a place is a number."""
    return isinstance(found, tuple) and found[0] in ("int", "float")
