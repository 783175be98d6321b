"""What an optimizer's code can reach outside of the optimizer: globals, closures, defaults, attributes of classes."""

from __future__ import annotations

import logging
import os
import random
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from torch.optim import Optimizer

from canzona_compile.compat.optimizer_class import class_as_written, plain_class
from canzona_compile.replica.copies import CachedCalls
from canzona_compile.replica.snapshot import (
    ATOMS,
    CACHED,
    Contents,
    Label,
    Snapshot,
    cells_of,
    changed,
    nothing_labelled,
)

# Packages whose code is not read: torch's, ours, and those that keep no numbers of an optimizer. Some count messages.
LOGGERS = {"absl", "loguru", "rich", "structlog", "tqdm"}
NOT_READ = {"torch", "canzona_compile", "numpy", "triton", "sympy", *LOGGERS, *sys.stdlib_module_names} - {"__main__"}


class Outside:
    """Everything outside of an optimizer that the code of its class names, as far as users wrote that code.

    A function is followed to those that it calls by name, to its default arguments and to the variables that it closes
    over. Code that finds things in another way, through `globals()` or `sys.modules`, is not followed.

    Args:
        calls: gives cached functions empty caches of their own, until `restore`; None leaves them as they are.

    As a context it restores what was there where it ends.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        label: Label = nothing_labelled,
        kept: Sequence[Any] = (),
        calls: CachedCalls | None = None,
    ) -> None:
        self._optimizer, self._kept, self._label = optimizer, kept, label
        self._kept_walk = walk_of(kept, label)
        self._calls = calls
        self.reads_variables = False
        self._walk = Snapshot(label, bits=False)
        self._put_back: list[Callable[[], None]] = []
        self._followed: set[int] = set()
        self._modules: set[tuple[int, frozenset[str]]] = set()
        for kind in class_as_written(plain_class(optimizer)).__mro__:
            self._follow(kind)
        for value in vars(optimizer).values():
            self._follow(value)
        # Generators of random numbers that belong to no device.
        self._walk.add("the generator of Python's random", hash(random.getstate()))
        self._walk.add("the generator of numpy.random", str(np.random.get_state(legacy=False)))

    @property
    def contents(self) -> Contents:
        """By place, what is there."""
        return self._walk.found | self._kept_walk.found

    @property
    def calls_problem(self) -> str:
        """Why the code needs the user's caches, see `CachedCalls`; empty if it does not."""
        return "" if self._calls is None else self._calls.problem

    def changed(self) -> list[str]:
        """The places at which there is something else by now."""
        return changed(self.contents, Outside(self._optimizer, self._label, self._kept).contents)

    def __enter__(self) -> Outside:
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    def restore(self) -> None:
        """Put back the numbers, texts and entries of containers that were there."""
        for undo in [*self._walk.undo, *self._put_back]:
            undo()
        if changed(self._kept_walk.found, walk_of(self._kept, self._label).found):  # else other threads may use them
            for undo in self._kept_walk.undo:
                undo()

    def _follow(self, value: Any) -> None:
        """Look at the code of a class, a function or an object with methods, once."""
        if isinstance(value, types.MethodType):
            value = value.__func__
        if isinstance(value, partial):
            value = value.func
        if not isinstance(value, type | types.FunctionType):
            value = type(value)
        if id(value) in self._followed or not is_read(value):
            return
        self._followed.add(id(value))
        if isinstance(value, type):
            self._follow_class(value)
        else:
            self._follow_function(value)

    def _follow_class(self, kind: type) -> None:
        for name, value in list(vars(kind).items()):
            inner = value.__func__ if isinstance(value, staticmethod | classmethod) else value
            if isinstance(inner, CACHED):
                self._cache(inner, partial(put_method, kind, name, value))
            elif function := function_in(value):
                self._follow(function)
            elif not name.startswith("__") and not isinstance(value, types.MemberDescriptorType):
                self._hold(
                    f"the class attribute {kind.__name__}.{name}",
                    partial(getattr, kind, name),
                    partial(setattr, kind, name),
                )

    def _follow_function(self, function: types.FunctionType) -> None:
        """Look at a function and at those that it wraps: a wrapper may keep results."""
        one: Any = function
        while one is not None:
            if isinstance(one, types.FunctionType) and is_read_in(one.__globals__.get("__name__")):
                self._follow_one(one)
            one = getattr(one, "__wrapped__", None)

    def _follow_one(self, function: types.FunctionType) -> None:
        names = set(names_in(function.__code__))
        where = function.__globals__
        for name in sorted(names & where.keys()):
            value = where[name]
            if isinstance(value, types.ModuleType):
                self._follow_module(value, names)
            elif isinstance(value, type | types.FunctionType):
                self.reads_variables |= value is os.getenv
                self._follow(value)
            else:
                self._hold(f"the global {name}", partial(where.get, name), partial(where.__setitem__, name))
        for name, value in cells_of(function):
            self._follow(value)
            index = function.__code__.co_freevars.index(name)
            cell = (function.__closure__ or ())[index]
            place = f"{name}, which {function.__name__} closes over"
            self._hold(place, partial(getattr, cell, "cell_contents"), partial(setattr, cell, "cell_contents"))
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._follow(value)
            if not isinstance(value, ATOMS):
                self._walk.add(f"a default argument of {function.__name__}", value)
        for name in vars(function):
            place = f"the attribute {function.__name__}.{name}"
            self._hold(place, partial(getattr, function, name), partial(setattr, function, name))

    def _follow_module(self, module: types.ModuleType, names: set[str]) -> None:
        if (key := (id(module), frozenset(names))) in self._modules:
            return
        self._modules.add(key)
        if names & {"environ", "getenv"} and module is os:
            self._walk.add("the environment", dict(os.environ))
            self.reads_variables |= "getenv" in names
        if not is_read_in(module.__name__):
            return
        for name in sorted(names & vars(module).keys()):
            value = vars(module)[name]
            if isinstance(value, type | types.FunctionType):
                self._follow(value)
            elif isinstance(value, types.ModuleType):
                self._follow_module(value, names)
            else:
                self._hold(f"{module.__name__}.{name}", partial(getattr, module, name), partial(setattr, module, name))

    def _cache(self, cached: Any, put: Callable[[Any], None]) -> None:
        """Follow a cached function, and put one with a cache of its own in its place."""
        function = cached.__wrapped__
        if not is_read(function):
            return
        self._follow(function)
        if self._calls is not None:
            put(self._calls.of_its_own(cached))
            self._put_back.append(partial(put, cached))

    def _hold(self, place: str, get: Callable[[], Any], put: Callable[[Any], None]) -> None:
        value = get()
        if isinstance(value, CACHED):
            self._cache(value, put)
            return
        if isinstance(value, type | types.FunctionType | types.ModuleType | logging.Logger):
            return
        self._walk.add(place, value)
        if isinstance(value, ATOMS):
            self._put_back.append(partial(put_back, get, put, value))


def walk_of(kept: Sequence[Any], label: Label) -> Snapshot:
    """Look at objects that copies share."""
    walk = Snapshot(label, bits=False)
    for i, value in enumerate(kept):
        walk.add(f"the {type(value).__name__} that copies share ({i})", value)
    return walk


def put_method(kind: type, name: str, old: Any, function: Any) -> None:
    """Put a function into a class, as a static or a class method if the old entry is one."""
    setattr(kind, name, type(old)(function) if isinstance(old, staticmethod | classmethod) else function)


def put_back(get: Callable[[], Any], put: Callable[[Any], None], value: Any) -> None:
    """Put a value back unless it is still there; some places, such as members of an Enum, cannot be written."""
    if get() is not value:
        put(value)


def is_read(code: Any) -> bool:
    """Tell whether the code of a class or a function may keep something of an optimizer."""
    return is_read_in(getattr(code, "__module__", None))


def is_read_in(module: str | None) -> bool:
    """Tell whether the code of a module may keep something of an optimizer."""
    return (module or "").partition(".")[0] not in NOT_READ


def function_in(value: Any) -> types.FunctionType | None:
    """The function behind an entry of a class: a method of any sort, or the getter of a property."""
    found = getattr(value, "__func__", None) or getattr(value, "fget", None) or getattr(value, "func", None) or value
    return found if isinstance(found, types.FunctionType) else None


def names_in(code: types.CodeType) -> Iterator[str]:
    """All names that a function's code mentions, also in the functions inside of it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from names_in(constant)
