"""What kernels read and write in Triton's interpreter, by address, and what of it is wrong.

The interpreter runs one program after another, so a race leaves no trace in its results. Which program touches which
address does tell: two programs that write one element, or one that reads what another one writes, would race.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import triton.runtime.interpreter as interpreter
from torch import Tensor

Places = npt.NDArray[np.uint64]


@dataclass(slots=True)
class MemoryLog:
    """Addresses of all elements that were read and written, and the programs that did so.

    Attributes:
        read, written: by access, the program's number and the addresses of the lanes that were not masked off.
    """

    read: list[tuple[int, Places]] = field(default_factory=list)
    written: list[tuple[int, Places]] = field(default_factory=list)

    def wrong(self, operands: Sequence[Tensor], result: Tensor) -> list[str]:
        """Say what is wrong with the accesses of one launch.

        Args:
            operands: what may be read.
            result: of which each element has to be written once. A program may read what it writes, others may not.
        """
        found = []
        places, programs = joined(self.written)
        unique, counts = np.unique(places, return_counts=True)
        expected = np.unique(elements(result))
        for what, own in (
            ("writes outside of the result", np.setdiff1d(unique, expected)),
            ("elements that nobody writes", np.setdiff1d(expected, unique)),
            ("elements that are written more than once", unique[counts > 1]),
        ):
            if len(own):
                found.append(f"{len(own)} {what}")
        reads, readers = joined(self.read)
        allowed = np.unique(np.concatenate([elements(x) for x in operands]))
        outside = np.setdiff1d(reads, allowed)
        if len(outside):
            found.append(f"{len(outside)} reads outside of the operands")
        order = np.argsort(places)
        shared = np.isin(reads, places)
        at = order[np.searchsorted(places, reads[shared], sorter=order)] if shared.any() else np.zeros(0, np.int64)
        raced = int((programs[at] != readers[shared]).sum())
        if raced:
            found.append(f"{raced} reads of what another program writes")
        return found


def joined(accesses: Sequence[tuple[int, Places]]) -> tuple[Places, npt.NDArray[np.int64]]:
    """All addresses, and the program of each."""
    if not accesses:
        return np.zeros(0, np.uint64), np.zeros(0, np.int64)
    places = np.concatenate([own for _, own in accesses])
    return places, np.repeat([program for program, _ in accesses], [len(own) for _, own in accesses])


def elements(x: Tensor) -> Places:
    """The addresses of a tensor's elements."""
    places = np.full(x.shape, x.data_ptr(), np.uint64)
    for dim, (size, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
        steps = np.arange(size, dtype=np.uint64) * np.uint64(stride * x.element_size())
        places += steps.reshape([-1 if d == dim else 1 for d in range(x.ndim)])
    return places.ravel()


class Spy:
    """The memory of the interpreter, which it reads and writes in C++; every access is logged and then made."""

    def __init__(self, real: Any, log: MemoryLog) -> None:
        self.real, self.log = real, log

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def load(self, pointers: Any, mask: Any, *rest: Any) -> Any:
        self.log.read.append((program(), np.asarray(pointers)[np.asarray(mask, bool)].astype(np.uint64)))
        return self.real.load(pointers, mask, *rest)

    def store(self, pointers: Any, value: Any, mask: Any) -> Any:
        self.log.written.append((program(), np.asarray(pointers)[np.asarray(mask, bool)].astype(np.uint64)))
        return self.real.store(pointers, value, mask)


def program() -> int:
    """The number of the program that runs."""
    return int(interpreter.interpreter_builder.grid_idx[0])


@contextmanager
def logged() -> Iterator[MemoryLog]:
    """Log the accesses of all kernels in the block."""
    log = MemoryLog()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_interpreter", Spy(interpreter._interpreter, log))
        yield log
