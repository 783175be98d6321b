"""Words on a device that change from step to step: addresses and numbers. One copy sends those that changed."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch


class StepWords:
    """A list of int64 words on a device, and what it should hold.

    Everything that a launch reads and that may be different on the next step lies in such words: so a CUDA graph holds
    the address of the words, and neither the addresses nor the numbers in them.

    The copy is put on the current stream, after all work there that reads what the words held before. Its source is
    pinned memory that is taken anew for each copy: torch gives that memory to nobody else until the copy is done. So
    the host neither waits nor overwrites what a copy still reads.

    Args:
        device: the device that they lie on.

    Attributes:
        wanted: what the words should hold; int64 [count].
        memory: the words on the device; int64 [count].
        copied: how many bytes all copies sent.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self.wanted: npt.NDArray[np.int64] = np.zeros(count, np.int64)
        self.memory = torch.zeros(count, dtype=torch.int64, device=device)
        self.copies = self.copied = 0
        self._sent = self.wanted.copy()

    def changed(self, first: int = 0, last: int | None = None) -> tuple[int, int] | None:
        """Return the range of words [first, last) that hold something else than they should; None if there is none."""
        found = np.flatnonzero(self.wanted[first:last] != self._sent[first:last])
        return (first + int(found[0]), first + int(found[-1]) + 1) if found.size else None

    def send(self, first: int = 0, last: int | None = None) -> None:
        """Send the words that changed among those in [first, last), by one copy. The host does not wait."""
        changed = self.changed(first, last)
        if changed is None:
            return
        part = slice(*changed)
        source = torch.from_numpy(self.wanted[part])
        if self.memory.device.type == "cuda":
            source = source.pin_memory()
        self.memory[part].copy_(source, non_blocking=True)
        self._sent[part] = self.wanted[part]
        self.copies += 1
        self.copied += source.nbytes


def even(count: int) -> int:
    """Round a number of words up, so that what follows them begins at a multiple of 16 bytes, as Triton expects."""
    return count + count % 2
