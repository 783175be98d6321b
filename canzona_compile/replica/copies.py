"""Copies of what users own, for trials. This is the only place that makes them.

A list says what is copied: containers, numbers, tensors, plain objects. All else is the same object in the copy. Many
objects hold a handle that their finalizer frees: a copy would free it once more, and with it memory that is in use.

Functions are shared, with two exceptions. Those that lead to parameters, which they close over or have as default
arguments, would step the real ones. Those whose results `functools.lru_cache` keeps would fill the caches of the user's
process.
"""

from __future__ import annotations

import array
import copy
import copyreg
import functools
import io
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from canzona_compile.compat.torch_private import pytree
from canzona_compile.errors import CanzonaError, UnsupportedOptimizer
from canzona_compile.replica.snapshot import (
    ATOMS,
    CACHED,
    SETS,
    Snapshot,
    attributes_of,
    cells_of,
    defaults_of,
    held_by,
    is_compiled,
    is_plain_object,
)

# Classes that are not written in Python, whose objects are values.
NUMPY_S = (np.random.Generator, np.random.BitGenerator, np.random.RandomState, np.random.SeedSequence)
CONTAINERS = (list, tuple, dict, set, frozenset, deque, OrderedDict, defaultdict, bytearray, array.array)
VALUES = (*CONTAINERS, slice, functools.partial, types.SimpleNamespace, io.StringIO, io.BytesIO, *NUMPY_S)
# Values that nobody can change, and objects that stand for nothing but themselves.
SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
CODE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)
SHARED: tuple[Any, ...] = (
    *ATOMS,
    *SYMBOLS,
    *CODE,
    np.generic,
    np.dtype,
    weakref.ref,
    weakref.finalize,
    *weakref.ProxyTypes,
)
# Their modules hold handles, threads, modes of tensors, and what torch's compiler knows; one copy of these is right.
MACHINERY = (
    *("asyncio", "concurrent", "ctypes", "logging", "multiprocessing", "queue", "selectors", "socket", "ssl"),
    *("subprocess", "threading", "triton"),
    *("torch._C", "torch._dynamo", "torch._functorch", "torch._inductor", "torch._ops", "torch._subclasses"),
    *("torch.cuda.graphs", "torch.cuda.streams", "torch.distributed", "torch.fx.experimental"),
    *("torch.multiprocessing", "torch.overrides", "torch.utils._python_dispatch"),
)
# Classes of these kinds are copied although torch has written them, or a base of theirs.
HOLDERS: tuple[Any, ...] = (Tensor, nn.Module, Optimizer, torch.Generator, torch.UntypedStorage, torch.TypedStorage)
CONSTANT = (str, bytes, type(None), torch.dtype, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type)
MOST = 20_000  # objects that are looked at below one that copies itself

Way = Callable[[Any], Any]


class Copies:
    """Deep copies of several things, among which equal identities stay equal.

    Args:
        given: originals, each with what stands for it in all copies. Functions that lead to them are copied, too.
        numbers: numbers that tell such originals apart, with those that tell their copies apart.

    Attributes:
        kept: the objects that are shared although code may change them: those with a finalizer, and those that cannot
            be copied. Whoever runs code on the copies has to look whether it changed them.
        calls: knows of the calls of copies of cached functions.
    """

    def __init__(self, given: Iterable[tuple[Any, Any]] = (), numbers: Mapping[int, int] | None = None) -> None:
        self.kept: list[Any] = []
        self.calls = CachedCalls()
        # The copies by the ids of the originals, as `__deepcopy__` takes them. It must live as long as this object:
        # its own id is among the keys, and so are the ids of objects that it alone keeps alive.
        self._memo: dict[Any, Any] = {}
        self._originals: list[Any] = []  # kept alive, so that their ids are given to no others
        self._ways: dict[type, Way] = {}
        self._numbers = numbers or {}
        for original, made in given:
            self._remember(original, made)
        self._given = frozenset(self._memo)

    def _remember(self, original: Any, made: Any) -> None:
        """Let something be the copy of an object, unless it has one already."""
        if id(original) not in self._memo:
            self._memo[id(original)] = made
            self._originals.append(original)

    def of(self, value: Any) -> Any:
        """Copy a value."""
        known = len(self._memo)
        try:
            return self._of(value)
        except RecursionError:
            self._forget(known)
            return self._keep(value)
        finally:
            self._ways.clear()  # they are bound to this object, which would keep all originals until Python looks

    def _of(self, value: Any) -> Any:
        kind = type(value)
        if kind in ATOMS:
            return self._numbers.get(value, value) if kind is int else value
        if id(value) in self._memo:
            return self._memo[id(value)]
        if kind not in self._ways:
            self._ways[kind] = self._way(kind)
        made = self._ways[kind](value)
        self._remember(value, made)
        return made

    # -- what is copied, and how -----------------------------------------------------------------------

    def _way(self, kind: type) -> Way:
        own: dict[type, Way] = {
            list: self._list,
            tuple: self._tuple,
            dict: self._dict,
            types.MethodType: lambda one: types.MethodType(one.__func__, self._of(one.__self__)),
            types.MappingProxyType: lambda one: types.MappingProxyType(self._of(dict(one))),
            types.GeneratorType: refused,
            types.FunctionType: self._function,
            types.CellType: self._cell,
            weakref.ref: self._weak_reference,
            CACHED: self._cached,
        }
        if kind in own:
            return own[kind]
        if is_shared(kind):
            return as_it_is
        if kind in VALUES:
            return self._reconstructed
        if is_compiled(kind) or hasattr(kind, "__del__"):  # a copy is no operator; a finalizer would run once more
            return self._keep
        by_base: dict[tuple[type, ...], Way] = {
            (torch.Generator,): lambda one: one.clone_state(),
            (weakref.WeakKeyDictionary, WeakIdKeyDictionary): self._weak_dict,
            (np.ndarray,): self._array,
            (Tensor,): self._by_its_own_code,
        }
        for bases, way in by_base.items():
            if issubclass(kind, bases):
                return way
        if isinstance(getattr(kind, "__deepcopy__", None), types.FunctionType):
            return self._by_its_own_code
        is_iterator = issubclass(kind, Iterator) and kind.__module__ in ("builtins", "itertools")
        if issubclass(kind, VALUES) or is_iterator or is_plain(kind):
            return self._reconstructed
        return self._keep

    def _list(self, value: list[Any]) -> list[Any]:
        made: list[Any] = []
        self._remember(value, made)
        made += map(self._of, value)
        return made

    def _tuple(self, value: tuple[Any, ...]) -> tuple[Any, ...]:
        entries = tuple(map(self._of, value))
        if id(value) in self._memo:  # one of the entries leads back to it
            found: tuple[Any, ...] = self._memo[id(value)]
            return found
        return value if all(new is old for new, old in zip(entries, value, strict=True)) else entries

    def _dict(self, value: dict[Any, Any]) -> dict[Any, Any]:
        made: dict[Any, Any] = {}
        self._remember(value, made)
        made.update((self._of(key), self._of(entry)) for key, entry in value.items())
        return made

    def _cached(self, value: Any) -> Any:
        """Make a cached function with a cache of its own, which holds nothing yet."""
        empty = functools.lru_cache(**value.cache_parameters())
        return self.calls.of_its_own(empty(self._of(value.__wrapped__)))

    def _function(self, value: types.FunctionType) -> types.FunctionType:
        if not leads(value, self._given):
            return value
        closure = tuple(map(self._of, value.__closure__ or ()))
        if id(value) in self._memo:  # it closes over itself
            found: types.FunctionType = self._memo[id(value)]
            return found
        made = types.FunctionType(value.__code__, value.__globals__, value.__name__, None, closure)
        self._remember(value, made)
        made.__qualname__, made.__module__ = value.__qualname__, value.__module__
        vars(made).update(vars(value))
        made.__defaults__, made.__kwdefaults__ = self._of(value.__defaults__), self._of(value.__kwdefaults__)
        return made

    def _cell(self, value: types.CellType) -> types.CellType:
        made = types.CellType()
        self._remember(value, made)
        if value != types.CellType():  # it has a value
            made.cell_contents = self._of(value.cell_contents)
        return made

    def _weak_reference(self, value: weakref.ref[Any]) -> Any:
        made = self._memo.get(id(value()))
        return value if made is None else weakref.ref(made)

    def _weak_dict(self, value: Any) -> Any:
        made = type(value)()
        self._remember(value, made)
        for key, entry in value.items():
            made[self._memo.get(id(key), key)] = self._of(entry)
        return made

    def _array(self, value: np.ndarray[Any, Any]) -> Any:
        made = value.copy()
        self._remember(value, made)
        if value.dtype == np.dtype(object):
            for place in np.ndindex(value.shape):
                made[place] = self._of(value[place])
        return made

    def _by_its_own_code(self, value: Any) -> Any:
        """Call the object's own `__deepcopy__`, which copies what it holds by the rules of Python, not by ours."""
        self._share_below(value)
        return self._tried(value, lambda: value.__deepcopy__(self._memo))

    def _reconstructed(self, value: Any) -> Any:
        return self._tried(value, lambda: self._reconstruct(value))

    def _reconstruct(self, value: Any) -> Any:
        """Copy an object by what it tells about itself: what makes it, and its state."""
        registered: Any = copyreg.dispatch_table.get(type(value))
        reduced = registered(value) if registered else value.__reduce_ex__(4)
        if isinstance(reduced, str):  # the name of a global
            return value
        self._originals.append(reduced)
        function, arguments, state, entries, pairs = (*reduced, None, None, None)[: max(5, len(reduced))]
        made = function(*map(self._of, arguments))
        self._remember(value, made)
        if state is not None:
            give_state(made, self._of(state))
        for entry in entries or ():
            made.append(self._of(entry))
        for key, entry in pairs or ():
            made[self._of(key)] = self._of(entry)
        return made

    # -- what is not -----------------------------------------------------------------------------------

    def _keep(self, value: Any) -> Any:
        """Share an object that code may change."""
        self._remember(value, value)
        self.kept.append(value)
        return value

    def _tried(self, value: Any, make: Callable[[], Any]) -> Any:
        """Make a copy by code of the object's class; if that fails, share the object."""
        known = len(self._memo)
        try:
            return make()
        except (CanzonaError, RecursionError):
            raise
        except Exception:  # whatever a class raises that cannot be copied
            self._forget(known)
            return self._keep(value)

    def _forget(self, known: int) -> None:
        """Forget the copies after the first ones, as what holds them was not made."""
        while len(self._memo) > known:
            self._memo.popitem()

    def _share_below(self, value: Any) -> None:
        """Let what must not be copied be its own copy, wherever an object holds it."""
        left, seen = below(value), {id(value)}
        while left and len(seen) < MOST:
            one = left.pop()
            if isinstance(one, ATOMS) or id(one) in seen or id(one) in self._memo:
                continue
            seen.add(id(one))
            way = self._way(type(one))
            inside = below(one)
            if way in (as_it_is, self._keep, refused, self._function, self._weak_reference):
                self._remember(one, way(one))
            elif not inside and way == self._reconstructed and not is_told(one):
                self._keep(one)
            else:
                left += inside


def deep_copy(value: Any) -> Any:
    """Copy one thing that users own."""
    return Copies().of(value)


def with_own_containers(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """The same attributes with shallow copies of lists, dicts and sets, so that code adds to others."""

    def own(value: Any) -> Any:
        if isinstance(value, list | dict | set) and not hasattr(type(value), "__del__"):
            return copy.copy(value)
        return value

    return {name: own(value) for name, value in attributes.items()}


def is_shared(kind: type) -> bool:
    """Whether objects of a class are never copied, and are no concern of trials."""
    if kind is object or issubclass(kind, SHARED):
        return True
    if issubclass(kind, HOLDERS):
        return False
    modules = [str(getattr(base, "__module__", "")) for base in kind.__mro__]
    return any(module == name or module.startswith(f"{name}.") for module in modules for name in MACHINERY)


def is_plain(kind: type) -> bool:
    """Whether a class leaves it to Python to tell what its objects hold, or tells so in Python.

    Python itself refuses where an object holds more than attributes, such as a handle.
    """
    for name in ("__reduce_ex__", "__reduce__", "__getstate__"):
        own = getattr(kind, name, None)
        if own is not getattr(object, name, None) and not isinstance(own, types.FunctionType):
            return False
    return True


def is_told(value: Any) -> bool:
    """Whether an object tells what it holds, as pickle asks it."""
    try:
        value.__reduce_ex__(4)
    except Exception:  # whatever a class raises that cannot be copied
        return False
    return True


def below(value: Any) -> list[Any]:
    """What a container or an object holds, with its keys."""
    found = [held.value for held in held_by(value)]
    if isinstance(value, (Mapping, *SETS)):
        found += value  # the keys
    if not is_plain_object(value):
        found += [held.value for held in attributes_of(value)]
    return found


def give_state(made: Any, state: Any) -> None:
    """Give a new object the state of another one, as pickle does."""
    if hasattr(made, "__setstate__"):
        made.__setstate__(state)
        return
    attributes, slots = state if isinstance(state, tuple) and len(state) == 2 else (state, None)
    if attributes:
        vars(made).update(attributes)
    for name, value in (slots or {}).items():
        setattr(made, name, value)


def as_it_is(value: Any) -> Any:
    """Share what is never copied."""
    return value


def refused(value: Any) -> Any:
    """Refuse a generator."""
    raise UnsupportedOptimizer(
        f"the optimizer holds a Python generator, {value!r}, and the update of each parameter would advance it",
        hint="compute its values from a counter in self.state[param] or in the parameter group",
    )


# -- functions --------------------------------------------------------------------------------------


class CachedCalls:
    """What is known of calls of cached functions, from a trial in which they have empty caches of their own.

    Attributes:
        problem: why steps have to use the user's cache itself, with the name of the function; empty if they need not.
    """

    def __init__(self) -> None:
        self.problem = ""

    def of_its_own(self, cached: Any) -> Any:
        """Make a function like a cached one, with an empty cache."""
        function = cached.__wrapped__
        reads = [name for name, value in read_by(function) if not isinstance(value, CONSTANT)]
        changing = f"it reads {reads[0]}, which may change" if reads else ""

        @functools.wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            if any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(result)):
                self._note(function, "it returns tensors")
            elif not all(isinstance(leaf, ATOMS) for leaf in pytree.tree_leaves((args, kwargs))):
                self._note(function, "its arguments may change")
            elif changing:
                self._note(function, changing)
            return result

        return functools.lru_cache(**cached.cache_parameters())(watched)

    def _note(self, function: Callable[..., Any], why: str) -> None:
        name = getattr(function, "__qualname__", "a function").rpartition("<locals>.")[2]
        self.problem = self.problem or f"calls {name}, whose results functools.lru_cache keeps: {why}"


def read_by(function: Any) -> list[tuple[str, Any]]:
    """The globals and the variables of enclosing functions that a function reads, by name."""
    if not isinstance(function, types.FunctionType):
        return []
    where = function.__globals__
    found = [(name, where[name]) for name in function.__code__.co_names if name in where]
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return found + [(name, cell) for name, cell in cells]


def leads(function: types.FunctionType, known: Collection[int]) -> bool:
    """Tell whether what a function closes over, or has as a default argument, holds something with a known id."""
    hits: list[Any] = []

    def label(one: Any) -> str | None:
        if id(one) in known:
            hits.append(one)
            return "known"
        return "a tensor" if isinstance(one, Tensor) else None

    walk = Snapshot(label, bits=False)
    for name, value in (*cells_of(function), *defaults_of(function)):
        walk.add(name, value)
    return bool(hits)
