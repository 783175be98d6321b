"""Python's search for garbage in cycles: seldom, or not at all, while work makes objects that stay."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

NEVER = 2**31 - 1


@contextlib.contextmanager
def seldom_collected() -> Iterator[None]:
    """Inside this context, Python searches among young objects only.

    To search among all, torch's modules included, takes a tenth of a first step's CPU time and finds nothing: the
    graphs and the copies of a plan stay, or are freed without it. Contexts may be nested.
    """
    before = gc.get_threshold()
    gc.set_threshold(*before[:2], NEVER)
    try:
        yield
    finally:
        if gc.get_threshold()[2] == NEVER:  # else code of users has set it meanwhile
            gc.set_threshold(*before)


@contextlib.contextmanager
def not_collecting() -> Iterator[None]:
    """Inside this context, Python does not search for garbage.

    In a recording it could free tensors, events and CUDA graphs of others. Plans of thousands of ranks make millions
    of small objects, and searching among them takes a fifth of all time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
