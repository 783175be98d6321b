"""Memory that several programs share, because they never run at the same time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(eq=False, slots=True)
class SharedSlot:
    """A slot of bytes that programs share.

    Attributes:
        memory: its bytes, uint8 [size]. A program that needs more bytes puts a larger tensor in their place.
    """

    memory: Tensor


class SharedSlots:
    """Slots of bytes that programs share.

    Steps on which the optimizer's code takes different variants run different programs. Their buffers have similar
    sizes, so one set of slots serves all of them.
    """

    def __init__(self) -> None:
        self._slots: list[SharedSlot] = []

    def of(self, sizes: Sequence[int], device: torch.device) -> list[SharedSlot]:
        """Return one slot per size. No slot is returned twice by one call.

        The largest size gets the largest slot, and so on. A slot that is too small grows. So the i-th largest slot is
        as large as the i-th largest one of any program, and no larger.

        Args:
            sizes: the least size of each slot in bytes.
            device: the device of new memory. All slots of one object lie on the same device.
        """
        order = sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True)
        for size in (sizes[i] for i in order[len(self._slots) :]):
            self._slots.append(SharedSlot(torch.empty(size, dtype=torch.uint8, device=device)))
        self._slots.sort(key=lambda slot: slot.memory.numel(), reverse=True)
        found = dict(zip(order, self._slots, strict=False))
        for i, slot in found.items():
            if slot.memory.numel() < sizes[i]:
                slot.memory = torch.empty(sizes[i], dtype=torch.uint8, device=device)
        return [found[i] for i in range(len(sizes))]

    @property
    def sizes(self) -> list[int]:
        """The size of every slot in bytes."""
        return [slot.memory.numel() for slot in self._slots]
