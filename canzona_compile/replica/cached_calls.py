"""Functions whose results `functools.lru_cache` keeps. Trials must not fill the caches of the user's process."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from canzona_compile.compat.torch_private import pytree
from canzona_compile.replica.snapshot import ATOMS

CONSTANT = (str, bytes, type(None), torch.dtype, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type)


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
