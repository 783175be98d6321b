"""The optimizers that an object holds, and the lines that wrap them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.optim import Optimizer

from canzona_compile.errors import some


def held_in(holder: object) -> dict[str, tuple[Optimizer, ...]]:
    """The optimizers that an object has as attributes, by themselves or in lists, tuples and dicts, by attribute."""
    found: dict[str, tuple[Optimizer, ...]] = {}
    for name, value in getattr(holder, "__dict__", {}).items():
        entries: Iterable[Any] = value.values() if isinstance(value, dict) else value
        inside = entries if isinstance(value, list | tuple | dict) else (value,)
        if own := tuple(one for one in inside if isinstance(one, Optimizer)):
            found[name] = own
    return found


def advice(holder: object) -> str:
    """Say how to wrap what an object holds, whose step cannot be replaced by those; empty if it holds none."""
    inner = held_in(holder)
    if not inner:
        return ""
    places = some([f"self.{name}" for name in inner])
    if sum(map(len, inner.values())) == 1:
        return f"{type(holder).__name__} holds another optimizer: wrap that one, {places}, before it is given"
    return f"{type(holder).__name__} holds other optimizers: wrap each of those, {places}, before they are given"
