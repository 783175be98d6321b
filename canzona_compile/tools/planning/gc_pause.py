"""Python's collector of cycles, out of the way of plans."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused() -> Iterator[None]:
    """Without the collector.

    Plans of thousands of ranks make millions of small objects, which it would look at again and again: a fifth of all
    time. Few of them are in cycles, and those wait until afterwards.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
