"""Call Dynamo as a recorder: apart from the user's own compiles, without messages, and outside dispatch modes."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import math
import threading
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from canzona_compile.compat.interrupts import interrupts_later
from canzona_compile.compat.matmul_precision import put_back, switches
from canzona_compile.compat.torch_private import (
    DYNAMO_LOGGER,
    FAKE_LOGGER,
    TorchDispatchMode,
    at_start_of_traces,
    dispatch_modes,
    guarded_values,
    set_in_dynamo,
    without_extras,
    without_function_modes,
    without_view_records,
)
from canzona_compile.replica.twin import as_written

StepFunction = Callable[[Any], Any]


_recording = threading.local()


@contextlib.contextmanager
def as_recorder() -> Iterator[None]:
    """Set up what Dynamo needs. Every call of a compiled step must run inside this context.

    Contexts may be nested: the outermost one sets up, and serves all questions of a step. `set_up_trace` sets up what
    matters only while Dynamo traces, because most questions trace nothing. So warnings of the optimizer's code are
    shown until the first trace begins.
    """
    if getattr(_recording, "inside", False):
        yield
        return
    with interrupts_later(), torch.no_grad(), set_for_recordings(), outside_modes(), contextlib.ExitStack() as traces:
        _recording.inside, _recording.traces = True, traces
        try:
            with at_start_of_traces(set_up_trace):
                yield
        finally:
            _recording.inside, _recording.traces = False, None


def set_up_trace(_args: Any) -> None:
    """Set up what only traces need, until the outermost `as_recorder` of this thread ends.

    Dynamo calls this for every trace of every thread. Only the first one inside a context of its own thread sets up.
    """
    traces: contextlib.ExitStack | None = getattr(_recording, "traces", None)
    if traces is not None:
        _recording.traces = None
        for set_up in (quiet, without_extras, untouched, traceable_pow):
            traces.enter_context(set_up())


def compiled(step: StepFunction, backend: Callable[..., Any], unbroken: bool = False) -> StepFunction:
    """Compile the step function of an optimizer class, apart from the compiles of the user."""
    options: dict[str, str | int | bool | Callable[..., Any]] = {"guard_filter_fn": without_guards_on_power}
    with without_extras():
        return torch.compile(
            own_code(step), backend=backend, dynamic=True, fullgraph=unbroken, options=options, **isolation()
        )


def own_code(step: StepFunction) -> StepFunction:
    """Copy a function with a code object of its own, because Dynamo counts recompiles per code object."""
    assert isinstance(step, types.FunctionType)
    twin = types.FunctionType(
        step.__code__.replace(), step.__globals__, step.__name__, step.__defaults__, step.__closure__
    )
    twin.__kwdefaults__ = step.__kwdefaults__
    return twin


def isolation() -> dict[str, Any]:
    """Return the options that keep this compile's cache entries apart from the user's, if torch has them (2.13)."""
    known = inspect.signature(torch.compile).parameters
    return {"isolate_recompiles": True} if "isolate_recompiles" in known else {}


@functools.cache  # making it takes longer than entering it
def set_for_recordings() -> contextlib.AbstractContextManager[Any]:
    """Keep Dynamo from spelling addcmul_, addcdiv_ and scaled add_ as products and sums, which round otherwise.

    Nor does it look whether its backend is one of those that it knows, which it loads all for that. What `.item()`
    reads, as of a counter in the state, does not break the graph: that shows whether the step is elementwise. Nor does
    it count recompiles: after a break it compiles the helpers of a step, of which all optimizers of a process have the
    same.
    """
    return set_in_dynamo(
        enable_dynamo_decompositions=False,
        invalidate_compile_context_weakrefs=False,
        capture_scalar_outputs=True,
        recompile_limit=2**31,
        accumulated_recompile_limit=2**31,
    )


@contextlib.contextmanager
def outside_modes() -> Iterator[None]:
    """Leave the caller's dispatch modes (FLOP counters, ...), because Dynamo runs no compiled code inside them.

    Function modes are left as well: Dynamo would trace them, and take what they count for a number of the step.

    This calls the methods of the base class. They maintain the flags that Dynamo reads, and they skip what a mode
    itself does on entry and exit.
    """
    modes = dispatch_modes()
    for mode in reversed(modes):
        TorchDispatchMode.__exit__(mode, None, None, None)
    try:
        with without_function_modes():
            yield
    finally:
        for mode in modes:
            TorchDispatchMode.__enter__(mode)


@contextlib.contextmanager
def eagerly() -> Iterator[None]:
    """Do what `as_written` does, such that torch keeps no record of which tensors are views.

    With that record it would not let an operator return a view again that it has returned before.
    """
    with as_written(), without_view_records(), silent(FAKE_LOGGER):
        yield


_pow = math.pow


@contextlib.contextmanager
def traceable_pow() -> Iterator[None]:
    """Inside this context, Dynamo traces `math.pow(beta, step)` as `beta ** step`. Otherwise it bakes in the step.

    A step that Dynamo has traced already runs outside of it, so compiled code must have no guard on the replacement,
    see `without_guards_on_power`.

    Torch could make this unnecessary with a `torch._sym_pow`, which Dynamo would take as it takes `torch._sym_sqrt`,
    or if `torch.compiler.substitute_in_graph` did not refuse functions that Dynamo knows. A copy of the step's globals
    would not do: published optimizers call `math.pow` in helpers of other modules.
    """
    math.pow = power
    try:
        yield
    finally:
        if math.pow is power:
            math.pow = _pow


@contextlib.contextmanager
def untouched() -> Iterator[None]:
    """Leave the switches of precision as they were. Dynamo sets one to its value, which may be that of its parent."""
    before = switches()
    try:
        yield
    finally:
        put_back(before)


def power(x: Any, y: Any) -> Any:
    """Stand in for `math.pow`. Dynamo sees a power of floats; threads that trace nothing get the real function."""
    return x**y * 1.0 if torch.compiler.is_dynamo_compiling() else _pow(x, y)


def without_guards_on_power(guards: Sequence[Any]) -> list[bool]:
    """Tell for each guard whether to keep it. Guards on `power` go, because it replaces `math.pow` only in traces."""
    return [value is not power for value in guarded_values(guards)]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence messages about a twin: that Dynamo ignores profiler ranges, its own deprecation warnings, and how an
    operator fails on tensors without values, which the error says."""
    with silent(DYNAMO_LOGGER), silent(FAKE_LOGGER), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def silent(logger: logging.Logger) -> Iterator[None]:
    """Inside this context, a logger drops its records.

    This adds a filter and sets no level: setting a level empties the caches of every logger of the process.
    """
    logger.addFilter(nothing)
    try:
        yield
    finally:
        logger.removeFilter(nothing)


def nothing(_record: logging.LogRecord) -> bool:
    """Reject a log record; this is a filter that rejects all of them."""
    return False
