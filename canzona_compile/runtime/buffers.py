"""Memory that several programs share, because they never run at the same time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class SharedSlots:
    """Slots of bytes that programs share.

    Steps on which the optimizer's code takes different variants run different programs. Their buffers have similar
    sizes, so one set of slots serves all of them.
    """

    def __init__(self) -> None:
        self._slots: list[Tensor] = []

    def of(self, sizes: Sequence[int], device: torch.device) -> list[Tensor]:
        """Return one slot per size. No slot is returned twice by one call.

        Each size gets the smallest existing slot that is large enough, or a new slot. Larger sizes choose first.

        Args:
            sizes: the least size of each slot in bytes.
            device: the device of new slots. All slots of one object lie on the same device.

        Returns:
            The slots in the order of `sizes`, each a one-dimensional uint8 tensor of at least that many elements.
        """
        free = sorted(self._slots, key=Tensor.numel)
        found: dict[int, Tensor] = {}
        for i in sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True):
            fit = next((k for k, slot in enumerate(free) if slot.numel() >= sizes[i]), None)
            if fit is None:
                found[i] = torch.empty(sizes[i], dtype=torch.uint8, device=device)
                self._slots.append(found[i])
            else:
                found[i] = free.pop(fit)
        return [found[i] for i in range(len(sizes))]
