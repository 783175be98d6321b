"""Copies of functions that have parameters: they close over them, or have them as default arguments.

Copies share functions, which would step the real ones.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from torch import Tensor

from canzona_compile.replica.copies import Copies
from canzona_compile.replica.snapshot import Snapshot, cells_of, defaults_of


def copy_closures(value: Any, copies: Copies) -> None:
    """Copy the functions in some objects, as far as they lead to what is copied already.

    Args:
        value: the objects.
        copies: has the copies of parameters and of the optimizer, and gets those of functions.
    """
    found: dict[int, types.FunctionType] = {}

    def label(one: Any) -> str | None:
        if copies.has(one):
            return "copied"
        if isinstance(one, Tensor):
            return "a tensor"
        if isinstance(one, types.FunctionType) and (one.__closure__ or one.__defaults__ or one.__kwdefaults__):
            found.setdefault(id(one), one)
        return None

    Snapshot(label, bits=False).add("", value)
    leading = [function for function in found.values() if leads(function, copies.has)]
    cells: dict[int, tuple[types.CellType, types.CellType]] = {}
    for function in leading:
        for cell in function.__closure__ or ():
            cells.setdefault(id(cell), (cell, types.CellType()))
        closure = tuple(cells[id(cell)][1] for cell in function.__closure__ or ())
        made = types.FunctionType(function.__code__, function.__globals__, function.__name__, None, closure)
        made.__qualname__, made.__module__ = function.__qualname__, function.__module__
        vars(made).update(vars(function))
        copies.put(function, made)
    for old, new in cells.values():
        try:
            new.cell_contents = copies.of(old.cell_contents)
        except ValueError:  # it has no value yet
            continue
    for function in leading:
        made = copies.of(function)
        made.__defaults__, made.__kwdefaults__ = copies.of(function.__defaults__), copies.of(function.__kwdefaults__)


def leads(function: types.FunctionType, known: Callable[[Any], bool]) -> bool:
    """Tell whether what a function closes over, or has as a default argument, holds something that is known."""
    hits: list[Any] = []

    def label(one: Any) -> str | None:
        if known(one):
            hits.append(one)
            return "known"
        return "a tensor" if isinstance(one, Tensor) else None

    walk = Snapshot(label, bits=False)
    for name, value in (*cells_of(function), *defaults_of(function)):
        walk.add(name, value)
    return bool(hits)
