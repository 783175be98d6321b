"""Memory of programs that never run at the same time, which they share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class SharedSlots:
    """Slots of bytes. Steps that take other variants of the code are other programs with buffers much alike."""

    def __init__(self) -> None:
        self._slots: list[Tensor] = []

    def of(self, sizes: Sequence[int], device: torch.device) -> list[Tensor]:
        """A slot per size, at least as large and each another one: the smallest that is there and fits, or a new one.

        Returns: [bytes] of uint8 on `device`, on which all slots are.
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
