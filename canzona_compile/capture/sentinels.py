"""Objects that stand for nothing but themselves, such as `DEFAULT = object()`. Code compares them by `is`."""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping
from typing import Any

from torch import Tensor

MOST = 20_000  # objects that are looked at


def sentinels(value: Any) -> dict[int, Any]:
    """Find the sentinels in containers and objects, by id: a memo with which a deep copy shares them."""
    atoms = (Tensor, type, types.ModuleType, types.FunctionType, int, float, str)
    found: dict[int, Any] = {}
    seen: set[int] = set()
    left = [value]
    while left and len(seen) < MOST:
        one = left.pop()
        if id(one) in seen or isinstance(one, atoms):
            continue
        seen.add(id(one))
        if type(one) is object:
            found[id(one)] = one
        elif isinstance(one, Mapping):
            left += [*one.keys(), *one.values()]
        elif isinstance(one, list | tuple | set | frozenset):
            left += one
        elif isinstance(one, functools.partial):
            left += [one.func, one.args, one.keywords]
        else:
            left.append(getattr(one, "__dict__", None))
    return found
