"""Copies of functions that close over parameters. A deep copy shares functions, and would step the real ones."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any

from canzona_compile.capture.contents import Walk, cells_of


def copy_closures(value: Any, memo: dict[int, Any]) -> None:
    """Put copies of the functions in some objects into the memo of a deep copy, as far as they lead into the memo.

    Args:
        value: the objects.
        memo: by id, the copies of parameters, of the optimizer and of what else was copied already.
    """
    found: dict[int, types.FunctionType] = {}

    def label(one: Any) -> str | None:
        if id(one) in memo:
            return "copied"
        if isinstance(one, types.FunctionType) and one.__closure__:
            found.setdefault(id(one), one)
        return None

    Walk(label, bits=False).add("", value)
    leading = [function for function in found.values() if leads(function, lambda one: id(one) in memo)]
    cells: dict[int, tuple[types.CellType, types.CellType]] = {}
    for function in leading:
        for cell in function.__closure__ or ():
            cells.setdefault(id(cell), (cell, types.CellType()))
        closure = tuple(cells[id(cell)][1] for cell in function.__closure__ or ())
        name, defaults = function.__name__, function.__defaults__
        made = types.FunctionType(function.__code__, function.__globals__, name, defaults, closure)
        made.__kwdefaults__, made.__qualname__, made.__module__ = (
            function.__kwdefaults__,
            function.__qualname__,
            function.__module__,
        )
        vars(made).update(vars(function))
        memo[id(function)] = made
    for old, new in cells.values():
        try:
            new.cell_contents = copy.deepcopy(old.cell_contents, memo)
        except ValueError:  # it has no value yet
            continue


def leads(function: types.FunctionType, known: Callable[[Any], bool]) -> bool:
    """Tell whether what a function closes over holds something that is known."""
    hits: list[Any] = []

    def label(one: Any) -> str | None:
        if known(one):
            hits.append(one)
            return "known"
        return None

    walk = Walk(label, bits=False)
    for name, value in cells_of(function):
        walk.add(name, value)
    return bool(hits)
