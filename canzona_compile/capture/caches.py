"""Keep tensors without values out of the caches that users' functions have.

A function with `functools.lru_cache` may make a tensor, such as an identity of some size. In a trial on fake tensors
that is a fake one, which the real step would find later.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from torch.optim import Optimizer

from canzona_compile.capture.outside import NOT_READ
from canzona_compile.capture.twin import plain_class


def caches_of(optimizer: Optimizer) -> list[Any]:
    """Find the functions with caches in the packages that define an optimizer's class and its bases."""
    packages = {kind.__module__.partition(".")[0] for kind in plain_class(optimizer).__mro__} - NOT_READ - {"builtins"}
    modules = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] in packages]
    values = [value for module in modules for value in list(getattr(module, "__dict__", {}).values())]
    methods = [value for kind in values if isinstance(kind, type) for value in list(vars(kind).values())]
    return list({id(value): value for value in (*values, *methods) if is_cache(value)}.values())


def is_cache(value: Any) -> bool:
    """Tell whether a value is what `functools.lru_cache` made of a function."""
    return type(value).__name__ == "_lru_cache_wrapper" and type(value).__module__ == "functools"


@contextlib.contextmanager
def without_traces(caches: Sequence[Any]) -> Iterator[None]:
    """Around a trial: caches that it filled are emptied."""
    before = [cache.cache_info().misses for cache in caches]
    try:
        yield
    finally:
        for cache, misses in zip(caches, before, strict=True):
            if cache.cache_info().misses != misses:
                cache.cache_clear()
