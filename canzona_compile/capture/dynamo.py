"""How Dynamo is called for its answers: apart from the user's own compiles, quietly, below no mode."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import math
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


@contextlib.contextmanager
def as_oracle() -> Iterator[None]:
    """Around a call of a compiled step."""
    with torch.no_grad(), quiet(), undecomposed(), outside_modes(), traceable_pow():
        yield


def own_code(step: Callable[..., Any]) -> Callable[..., Any]:
    """The same function with a code object of its own: Dynamo counts recompiles per code object."""
    assert isinstance(step, types.FunctionType)
    twin = types.FunctionType(
        step.__code__.replace(), step.__globals__, step.__name__, step.__defaults__, step.__closure__
    )
    twin.__kwdefaults__ = step.__kwdefaults__
    return twin


def isolation() -> dict[str, Any]:
    """Keep this compile's cache entries apart from the user's, where torch can (2.13)."""
    known = inspect.signature(torch.compile).parameters
    return {"isolate_recompiles": True} if "isolate_recompiles" in known else {}


@functools.cache  # making it takes longer than entering it
def undecomposed() -> contextlib.AbstractContextManager[Any]:
    """Keep Dynamo from spelling addcmul_, addcdiv_ and scaled add_ as products and sums, which round otherwise."""
    name = "enable_dynamo_decompositions"
    known = hasattr(torch._dynamo.config, name)
    return torch._dynamo.config.patch({name: False}) if known else contextlib.nullcontext()


@contextlib.contextmanager
def outside_modes() -> Iterator[None]:
    """Lift dispatch modes of the caller (FLOP counters, ...): Dynamo runs nothing compiled below them.

    By the base class's own methods, as they keep flags that Dynamo asks for, and what a mode itself does
    on entry and exit must not happen.
    """
    modes = [torch._C._get_dispatch_stack_at(i) for i in range(torch._C._len_torch_dispatch_stack())]
    for mode in reversed(modes):
        TorchDispatchMode.__exit__(mode, None, None, None)
    try:
        yield
    finally:
        for mode in modes:
            TorchDispatchMode.__enter__(mode)


@contextlib.contextmanager
def traceable_pow() -> Iterator[None]:
    """Let Dynamo see `math.pow(beta, step)` as `beta ** step`; of itself it makes a constant of the step."""
    original = math.pow
    math.pow = power
    try:
        yield
    finally:
        math.pow = original


def power(x: Any, y: Any) -> Any:
    return x**y * 1.0


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence what Dynamo says of a twin: that it ignores profiler ranges, deprecations of its own.

    A filter, not a level: setting a level empties the caches of every logger of the process.
    """
    logger = logging.getLogger("torch._logging._internal")
    logger.addFilter(nothing)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.removeFilter(nothing)


def nothing(_record: logging.LogRecord) -> bool:
    return False
