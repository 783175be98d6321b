"""One call at a time works on an optimizer: a step, or one that needs the state between two steps."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from canzona_compile.errors import CanzonaError

STEP = "step()"


class Turns:
    """Whose turn it is with an optimizer, or with those of a chain.

    Attributes:
        lock: of the thread whose turn it is; other threads wait.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._call = ""  # under way
        self._trainer = threading.main_thread()  # took the last step

    @contextlib.contextmanager
    def take(self, call: str = STEP) -> Iterator[None]:
        """Inside this context, a call is under way."""
        with self.lock:
            outer = self._call
            if outer and (outer, call) != (STEP, STEP):  # a chain's step has those of its optimizers inside
                raise CanzonaError(
                    f"{call} was called in the middle of {outer} of the same optimizer, and nothing was changed",
                    hint="let a signal handler set a flag, and make this call after step(); register a hook that makes "
                    "it with the chain, not with one of its optimizers",
                )
            if call == STEP:
                self._trainer = threading.current_thread()
            self._call = call
            try:
                yield
            finally:
                self._call = outer

    def check_thread(self, call: str) -> None:
        """Raise if a thread beside the one that trains makes a call that waits for other ranks, as steps do."""
        if threading.current_thread() not in (self._trainer, threading.main_thread()):
            raise CanzonaError(
                f"{call} was called in a thread of its own, but needs all ranks, which may be in a step",
                hint="make this call between steps, in the thread that trains, and give its result to the other one",
            )
