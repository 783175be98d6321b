"""A thin layer for tests of others: every optimizer that a test constructs is wrapped as soon as it is made.

`foreign_run.py` switches it on. An optimizer is wrapped after its outermost `__init__`, so tests keep the class that
they wrote, and `isinstance` and subclasses work as before.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from torch.optim import Optimizer

OURS = "canzona_compile"  # what it defines or constructs stays as it is
_here = threading.local()


def install(wrap: Callable[[Any], Any], log: Path) -> None:
    """Call `wrap` on every optimizer that is constructed from now on, of classes that exist and of later ones.

    Args:
        wrap: what is done to an optimizer.
        log: a file that gets a byte for each, also from processes that a test starts.
    """

    def done(optimizer: Any) -> None:
        with log.open("ab") as file:
            file.write(b".")
        wrap(optimizer)

    def created(cls: type[Any], **given: Any) -> None:
        super(Optimizer, cls).__init_subclass__(**given)
        call_after_init(cls, done)

    classes: list[type[Any]] = [Optimizer, *subclasses(Optimizer)]
    for kind in classes:
        call_after_init(kind, done)
    Optimizer.__init_subclass__ = classmethod(created)  # type: ignore[assignment, arg-type]


def subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    """All classes below one."""
    for sub in kind.__subclasses__():
        yield sub
        yield from subclasses(sub)


def call_after_init(kind: type[Any], done: Callable[[Any], None]) -> None:
    """Make the class's own `__init__`, if it has one, call a function on each object that is complete after it."""
    init = vars(kind).get("__init__")
    if init is None or kind.__module__.split(".")[0] == OURS:
        return

    @functools.wraps(init)
    def outermost(self: Any, *args: Any, **kwargs: Any) -> None:
        being_made: set[int] = vars(_here).setdefault("being_made", set())
        if id(self) in being_made or getattr(_here, "plain", False) or called_by_ours():
            init(self, *args, **kwargs)
            return
        being_made.add(id(self))
        try:
            init(self, *args, **kwargs)
        finally:
            being_made.discard(id(self))
        done(self)

    kind.__init__ = outermost


def called_by_ours() -> bool:
    """Whether our own code is constructing: objects of single matrices, and those of rehearsals, stay plain."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").split(".")[0] == OURS:
            return True
        frame = frame.f_back
    return False


@contextmanager
def plain() -> Iterator[None]:
    """Leave optimizers plain that are constructed meanwhile."""
    _here.plain = True
    try:
        yield
    finally:
        _here.plain = False
