"""Ctrl-C while optimizers are captured: it waits for the next moment at which nothing of ours is in the process.

Python raises `KeyboardInterrupt` between any two instructions of the main thread: between the entry of a mode and the
`try` that leaves it, so that the mode would stay; or in Dynamo's guards, which are C++ and would end the process. So
captures and passes run inside of `interrupts_later`, which notes the signal. It acts at the end of the outermost such
context, and before that wherever the work asks (`interrupted_here`), some times a second. That holds for a second
Ctrl-C as well; Ctrl-\\ (SIGQUIT) ends the process at once.
"""

from __future__ import annotations

import functools
import signal
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

CallArguments = ParamSpec("CallArguments")
Result = TypeVar("Result")
Handler = Callable[[int, types.FrameType | None], Any]


@dataclass(slots=True)
class Interrupts:
    """Those of the main thread.

    Attributes:
        handler: what acts on them; None outside of all contexts.
    """

    handler: Handler | None = None
    caught: list[tuple[int, types.FrameType | None]] = field(default_factory=list)

    def note(self, number: int, frame: types.FrameType | None) -> None:
        """Keep a signal for later. This is the handler inside of contexts."""
        self.caught.append((number, frame))

    def act(self, handler: Handler) -> None:
        """Do now what a caught signal does; it may raise."""
        if self.caught:
            last = self.caught[-1]
            self.caught.clear()
            handler(*last)


_interrupts = Interrupts()
_note = _interrupts.note  # one object, so that `is` tells whether it is the handler


@contextmanager
def interrupts_later() -> Iterator[None]:
    """Inside this context Ctrl-C waits. Contexts may be nested. Other threads get no signals, so nothing changes there.

    A handler that ignores the signal, or that is not Python's, stays.
    """
    given = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(given) or given is _note:
        yield
        return
    _interrupts.handler = given
    signal.signal(signal.SIGINT, _note)
    try:
        yield
    finally:
        _interrupts.handler = None
        if signal.getsignal(signal.SIGINT) is _note:
            signal.signal(signal.SIGINT, given)
        _interrupts.act(given)


def interrupted_here() -> None:
    """Act on a signal that waits. Call this where an exception leaves nothing behind."""
    handler = _interrupts.handler
    if _interrupts.caught and handler is not None and threading.current_thread() is threading.main_thread():
        _interrupts.act(handler)


@functools.cache  # steps of every kind take it
def one_thread() -> AbstractContextManager[bool]:
    """Return the lock of Dynamo. Code that seeds or watches the generators of the process holds it.

    Nothing that waits for other ranks or threads may run inside of it: a thread that compiles waits for it.
    """
    from canzona_compile.compat.torch_private import lock_of_dynamo  # late: importing the package loads no torch

    return lock_of_dynamo()


def uninterrupted(function: Callable[CallArguments, Result]) -> Callable[CallArguments, Result]:
    """Run a function inside of `interrupts_later`, in one thread at a time. This is a decorator.

    Rehearsals seed the generators of the process and look at what its modules hold, which other threads may do as well.
    The lock is Dynamo's own, so that no other thread resets Dynamo meanwhile.
    """

    @functools.wraps(function)
    def run(*args: CallArguments.args, **kwargs: CallArguments.kwargs) -> Result:
        with one_thread(), interrupts_later():
            return function(*args, **kwargs)

    return run
