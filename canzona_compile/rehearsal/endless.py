"""End steps of trials that would not end by themselves, or that would end the process.

Rehearsals give gradients that a training may never have: NaN, zeros, huge ones. A loop such as `while not norm < 1e-3`
does not end for NaN, and LAPACK's general eigenvalues read outside of their memory. The same lines of Python count on
every rank, so all ranks end such a step at the same place.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from canzona_compile.compat.interrupts import interrupted_here
from canzona_compile.compat.torch_private import TorchDispatchMode, pytree

OURS = ("compat", "eager", "rehearsal", "replica")
MOST_LINES = 3_000_000  # of users' code in a step of ordinary gradients: some seconds, in matrices of a few elements
ENOUGH_LINES = 5_000  # that a step of odd gradients may take in any case
MORE_LINES = 20  # times those of the longest ordinary step, in a step of odd gradients
BETWEEN_LOOKS = 1000  # lines between two looks whether Ctrl-C waits
# Folders whose code is not that of users: torch's, and ours that steps copies.
NOT_USERS = tuple(map(str, (Path(torch.__file__).parent, *(Path(__file__).parents[1] / r for r in OURS))))
UNGUARDED = (torch.ops.aten.linalg_eig.default, torch.ops.aten._linalg_eigvals.default)


class Endless(BaseException):
    """A step does not end, or would end the process. It is no `Exception`, because steps catch those."""


class Lines:
    """Counts the lines of users' code that steps execute."""

    def __init__(self) -> None:
        self.longest = 0
        self._count = self._most = 0

    @contextmanager
    def bounded(self, odd: bool) -> Iterator[None]:
        """Inside this context, a step that executes too many lines is ended. Where a debugger traces, nothing is."""
        if sys.gettrace() is not None:
            yield
            return
        self._count, self._most = 0, max(ENOUGH_LINES, MORE_LINES * self.longest) if odd else MOST_LINES
        sys.settrace(self._enter)
        try:
            yield
        finally:
            sys.settrace(None)
            if not odd:
                self.longest = max(self.longest, self._count)

    def _enter(self, frame: types.FrameType, event: str, arg: Any) -> Any:
        return None if frame.f_code.co_filename.startswith(NOT_USERS) else self._line

    def _line(self, frame: types.FrameType, event: str, arg: Any) -> Any:
        if event == "line":
            self._count += 1
            if self._count % BETWEEN_LOOKS == 0:
                interrupted_here()
            if self._count > self._most:
                raise Endless(f"{self._most} lines of code")
        return self._line


class NoCrash(TorchDispatchMode):
    """Inside this mode, operators that end the process for NaN or infinity end the step instead."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in UNGUARDED and any(unfinished(one) for one in pytree.tree_leaves(args)):
            raise Endless(str(func))
        return func(*args, **(kwargs or {}))


def unfinished(value: Any) -> bool:
    """Whether a tensor has an element that is not a finite number."""
    return isinstance(value, Tensor) and not bool(torch.isfinite(value).all())
