"""Which elements of a fragment something consists of, and how to take them out and put them back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Elements(Protocol):
    """Some elements of a fragment, which is a tensor that one rank holds."""

    def of(self, values: Tensor) -> Tensor:
        """These elements of a fragment: as a view if that view is contiguous, else as a copy."""

    def put(self, values: Tensor, own: Tensor) -> None:
        """Write these elements into a fragment, unless `own` is a view of that fragment.

        Args:
            values: the fragment.
            own: the elements, in any shape.
        """


class AllElements:
    """All elements of a fragment, which need not be contiguous."""

    def of(self, values: Tensor) -> Tensor:
        return values

    def put(self, values: Tensor, own: Tensor) -> None:
        if not shares_memory(own, values):
            values.copy_(own.view(values.shape))


@dataclass(frozen=True, slots=True)
class FlatRange:
    """Consecutive elements of a contiguous fragment in its flattened order, from `start` up to `stop`."""

    start: int
    stop: int

    def of(self, values: Tensor) -> Tensor:
        return values.view(-1)[self.start : self.stop]

    def put(self, values: Tensor, own: Tensor) -> None:
        if not shares_memory(own, values):
            values.view(-1)[self.start : self.stop] = own.view(-1)


@dataclass(frozen=True, eq=False, slots=True)
class SomeRows:
    """Some rows of a fragment, in an order of their own.

    Attributes:
        dim: the dimension that is cut.
        entries: the rows, as indices into the fragment (int64).
        first: the first of `entries` if they are consecutive; None otherwise.
    """

    dim: int
    entries: Tensor
    first: int | None

    @classmethod
    def at(cls, dim: int, entries: Tensor, device: torch.device) -> SomeRows:
        """The rows at these indices, of fragments on a device."""
        first = int(entries[0]) if len(entries) else 0
        consecutive = torch.equal(entries, torch.arange(first, first + len(entries), device="cpu"))
        return cls(dim, entries.to(device), first if consecutive else None)

    def of(self, values: Tensor) -> Tensor:
        if self.first is None:
            return values.index_select(self.dim, self.entries)
        return values.narrow(self.dim, self.first, len(self.entries)).contiguous()

    def put(self, values: Tensor, own: Tensor) -> None:
        if not own.numel() or shares_memory(own, values):
            return
        own = own.reshape(*values.shape[: self.dim], len(self.entries), *values.shape[self.dim + 1 :])
        if self.first is None:
            values.index_copy_(self.dim, self.entries, own)
        else:
            values.narrow(self.dim, self.first, len(self.entries)).copy_(own)


def shares_memory(part: Tensor, whole: Tensor) -> bool:
    """Tell whether two tensors have the same storage."""
    return part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
