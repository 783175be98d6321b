"""Which elements of a fragment something consists of, and how to take them out and put them back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False, slots=True)
class Elements:
    """Some elements of a fragment, which is a tensor that one rank holds.

    Attributes:
        dim: the dimension that is cut; None if that is the flattened fragment, which must be contiguous then.
        entries: the entries as indices (int64); None if they are consecutive.
    """

    dim: int | None
    first: int
    length: int
    entries: Tensor | None = None

    @classmethod
    def at(cls, dim: int, entries: Tensor, device: torch.device) -> Elements:
        """The entries at these indices along a dim, of fragments on a device."""
        first = int(entries[0]) if len(entries) else 0
        consecutive = torch.equal(entries, torch.arange(first, first + len(entries), device="cpu"))
        return cls(dim, first, len(entries), None if consecutive else entries.to(device))

    def of(self, values: Tensor) -> Tensor:
        """These elements of a fragment: as a view if that view is contiguous, else as a copy."""
        line, dim = self._line(values)
        if self.entries is not None:
            return line.index_select(dim, self.entries)
        return line.narrow(dim, self.first, self.length).contiguous()

    def place(self, values: Tensor) -> Tensor | None:
        """Where these elements are in a fragment, as a view of it; None if no view shows them."""
        if self.entries is not None:
            return None
        line, dim = self._line(values)
        return line.narrow(dim, self.first, self.length)

    def put(self, values: Tensor, own: Tensor) -> None:
        """Write these elements into a fragment, unless `own` is a view of that fragment.

        Args:
            own: the elements, in any shape.
        """
        if not own.numel() or shares_memory(own, values):
            return
        place = self.place(values)
        if place is not None:
            place.copy_(own.reshape(place.shape))
        elif self.entries is not None:
            line, dim = self._line(values)
            line.index_copy_(dim, self.entries, own.reshape(*line.shape[:dim], self.length, *line.shape[dim + 1 :]))

    def _line(self, values: Tensor) -> tuple[Tensor, int]:
        """A fragment, as far as it has to be flat, and the dim along which it is cut."""
        return (values.view(-1), 0) if self.dim is None else (values, self.dim)


def shares_memory(part: Tensor, whole: Tensor) -> bool:
    """Tell whether two tensors have the same storage."""
    return part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
