"""Watch for calls of functions that `torch.compile` returned. What depends on how torch makes these is all here.

Such a function is a closure that holds the user's function and the settings of the compile. Python's profiler sees its
calls however code reaches it, also where it runs as written.
"""

from __future__ import annotations

import contextlib
import dis
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType, FrameType, FunctionType
from typing import Any, NamedTuple

MADE_BY_TORCH = "_TorchDynamoContext.__call__."  # how the qualified name of such a function begins
USERS, SETTINGS = "fn", "self"  # what holds the user's function and the settings in it


class CompiledFunction(NamedTuple):
    """A function that `torch.compile` returned, and where the user keeps it.

    Attributes:
        name: the module and the name in it.
        function: the function.
    """

    name: str
    function: Any


@dataclass(slots=True)
class CompiledCalls:
    """How often functions were called that users compiled, other than by one another; set inside `compiled_calls`."""

    count: int = 0

    @property
    def happened(self) -> bool:
        return self.count > 0


@contextlib.contextmanager
def compiled_calls() -> Iterator[CompiledCalls]:
    """Count the calls of functions that `torch.compile` returned, also where they run as written."""
    found = CompiledCalls()

    def count(_frame: FrameType) -> None:
        found.count += 1

    with watched_calls(count, lambda _result, _returned: None):
        yield found


@contextlib.contextmanager
def watched_calls(begin: Callable[[FrameType], None], end: Callable[[Any, bool], None]) -> Iterator[None]:
    """Inside this context, learn of calls of functions that `torch.compile` returned. Both functions must not raise.

    Args:
        begin: gets the frame of each call that is not inside of another one.
        end: gets what that call returned, and whether it returned at all; if not, it raised.
    """
    before: Any = sys.getprofile()
    inside: FrameType | None = None

    def watch(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal inside
        if event == "call" and inside is None and frame.f_code.co_qualname.startswith(MADE_BY_TORCH):
            inside = frame
            begin(frame)
        elif event == "return" and frame is inside:
            inside = None
            end(argument, at_return(frame.f_code, frame.f_lasti))

    sys.setprofile(watch)
    try:
        yield
    finally:
        if before is None or callable(before):
            sys.setprofile(before)
        else:  # a profiler in C, such as cProfile, which Python cannot call
            sys.setprofile(None)
            before.enable()


def at_return(code: CodeType, instruction: int) -> bool:
    """Tell whether an instruction returns. The profiler reports calls that raise as if they had returned None."""
    return dis.opname[code.co_code[instruction]].startswith("RETURN")


def arguments_of(frame: FrameType) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call that has just begun."""
    return frame.f_locals["args"], frame.f_locals["kwargs"]


def compiled_function(frame: FrameType) -> CompiledFunction | None:
    """Find the function that was called in the module of the user's function, so that it can be called again.

    The frame of a call does not hold the function itself. A new one, of the same function, would compile apart from it.

    Args:
        frame: the frame of its call.

    Returns:
        The function; None if the module has no name for it.
    """
    users = frame.f_locals[USERS]
    module, qualified = sys.modules.get(getattr(users, "__module__", "")), getattr(users, "__qualname__", "")
    own: Any = module
    for part in qualified.split("."):
        own = getattr(own, part, None)
    for name, value in ((qualified, own), *vars(module or object).items()):
        if is_called(value, frame):
            return CompiledFunction(f"{users.__module__}.{name}", value)
    return None


def is_called(value: Any, frame: FrameType) -> bool:
    """Tell whether an object is the function whose call a frame is."""
    if not isinstance(value, FunctionType) or value.__code__ is not frame.f_code:
        return False
    held = dict(zip(value.__code__.co_freevars, value.__closure__ or (), strict=True))
    return all(held[name].cell_contents is frame.f_locals[name] for name in (USERS, SETTINGS))
