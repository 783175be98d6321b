"""The logical matrices of a fused parameter, such as q, k and v of qkv; each is shown as a parameter of its own.

A stack of matrices that nobody holds whole is shown as ranges of its matrices, so that it may have several owners.

In portable state, leaves that have the shape of their pieces are joined into one leaf with the shape of the fused
parameter. All other leaves are kept once per piece, with keys such as "q.left" and "k.left". Those of ranges are joined
along the matrices: what a checkpoint has does not depend on how a stack was divided.

A piece of a DTensor is a DTensor of the piece's shape. Its fragments follow the layout of the piece, not its
placements, so no DTensor operation may run on it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from canzona_compile.ir.bucket import BucketSlice
from canzona_compile.ir.layout import Box, Layout, dtensor_layout, laid_out_by_entries
from canzona_compile.ir.split import Split, entries_in, part_of_layout, rows_of
from canzona_compile.replica.leaves import LeafPath, paths_of, read, structure_of, write
from canzona_compile.tensors import local_part
from canzona_compile.views.entries import cut_along_experts
from canzona_compile.views.view import Elements, ParamView, State, ViewPart, WholeOf, rewritten


class PiecesView(ParamView):
    """Shows a fused parameter as its pieces, a stack as ranges of its matrices, or a stack of both as pieces of ranges.

    Args:
        split: says which pieces there are; None if the parameter is a stack that has no others than ranges.
        ranges: the first matrix of each range of a stack, and the number of matrices; none for a parameter that is not
            divided in that way. They count from the first matrix of which this rank holds a fragment, and cover all
            such matrices.
    """

    def __init__(
        self, name: str, source: Tensor, split: Split | None, box: Box, ranges: Sequence[tuple[int, int]] = ()
    ) -> None:
        self.split, self.ranges = split, tuple(ranges)
        shape = tuple(source.shape)
        self._places: dict[str, tuple[tuple[int, int] | None, Tensor | None]] = {}
        parts = []
        for own in self.ranges or (None,):
            label = "" if own is None else f"{box.start[0] + own[0]}:{box.start[0] + sum(own)}"
            for piece, rows in ({"": None} if split is None else rows_of(split)).items():
                full = ".".join(word for word in (label, piece) if word)
                self._places[f"{name}[{full}]"] = own, rows
                whole = shape if own is None else (own[1], *shape[1:])
                if split is not None and rows is not None:
                    whole = (*whole[: split.dim], len(rows), *whole[split.dim + 1 :])
                parts.append(ViewPart(f"{name}[{full}]", whole, self._elements(own, rows, box, source), piece))
        super().__init__(name, source, parts, box)

    def _elements(self, own: tuple[int, int] | None, rows: Tensor | None, box: Box, source: Tensor) -> Elements:
        """The elements of a fragment that a part has."""
        if self.split is None or rows is None:
            assert own is not None
            return Elements(0, *own)
        found = Elements.at(self.split.dim, entries_in(box, rows, self.split.dim), source.device)
        return replace(found, inside=own)

    @property
    def keeps_entries(self) -> bool:
        """Whether a rank that holds some entries of a stack holds the same ones of each part.

        If the entries are what is split, they belong to parts by their place in the whole stack.
        """
        return not self.ranges and (self.split is None or self.split.dim > 0)

    def layout_of(self, part: str, layout: Layout) -> Layout:
        """Derive the layout of a part from that of the parameter, or of this rank's entries of it."""
        own, rows = self._places[part]
        if own is not None:
            layout = part_of_layout(layout, torch.arange(own[0], sum(own), device="cpu"), 0)
        return layout if self.split is None or rows is None else part_of_layout(layout, rows, self.split.dim)

    # -- state -------------------------------------------------------------------------------------

    def key_in(self, path: LeafPath) -> str:
        """The key of the piece that alone has a leaf of portable state; empty for a leaf of the fused parameter."""
        key = str(path[0]).rpartition(".")[0]
        return key if key and any(part.key == key for part in self.parts) else ""

    def own_leaves(self, leaves: Mapping[str, LeafPath]) -> frozenset[str]:
        """The leaves of portable state that some piece alone has."""
        return frozenset(leaf for leaf, path in leaves.items() if self.key_in(path))

    def _state_of(self, state: Mapping[str, Any], part: ViewPart) -> State:
        common = {key: value for key, value in state.items() if not self.key_in((key,))}
        made = super()._state_of(common, part)
        for key, value in state.items() if part.key else ():
            if self.key_in((key,)) != part.key:
                continue
            own = rewritten({str(key)[len(part.key) + 1 :]: value}, lambda _, leaf: self._of_range(part, leaf))
            for path in paths_of(own).values():  # an entry may have leaves of both sorts, with None for the others
                if (leaf := read(own, path)) is not None or path[0] not in made:
                    write(made, path, leaf, structure_of(own))
        return made

    def _leaf_of(self, part: ViewPart, path: LeafPath, value: Any) -> Any:
        unlike = isinstance(value, Tensor) and value.ndim and value.shape != self.source.shape
        if unlike and self.ranges and not part.key:
            return self._of_range(part, value)
        return super()._leaf_of(part, path, value)

    def _of_range(self, part: ViewPart, value: Any) -> Any:
        """What a part has of a leaf that is no fragment: of one with a value per matrix, those of its range."""
        own, _ = self._places[part.name]
        if own is None or not isinstance(value, Tensor) or not value.ndim:
            return value
        held = local_part(value)
        whole = not isinstance(value, DTensor) and len(held) == len(self.source)
        return held.narrow(0, own[0] + whole * self.box.start[0], own[1]).clone(memory_format=torch.preserve_format)

    def _apart(
        self, leaf: str, held: Sequence[tuple[ViewPart, State, Any]], whole_of: WholeOf
    ) -> Iterator[tuple[str, State, Any]]:
        found = list(super()._apart(leaf, held, whole_of))
        if not self.ranges:
            yield from found
            return
        for label in dict.fromkeys(own for own, _, _ in found):
            _, state, value = next(one for one in found if one[0] == label)
            values = [own for piece, _, own in found if piece == label]
            if isinstance(value, Tensor) and value.ndim:
                value = one_after_the_other(values)
                if cut_along_experts(self.source):
                    value = laid_out_by_entries(value, self.source)
            yield label, state, value


def one_after_the_other(values: Sequence[Tensor]) -> Tensor:
    """Concatenate what ranges of a stack have for each matrix, which lies as it lay before."""
    one, count = values[0], sum(map(len, values))
    whole = one.new_empty_strided((count, *one.shape[1:]), (math.prod(one.shape[1:]), *one.stride()[1:]))
    return torch.cat(list(values), out=whole)


class SlicesView(ParamView):
    """Shows a parameter as slices of its elements.

    Args:
        source: the parameter, contiguous.
    """

    def __init__(self, name: str, source: Tensor, slices: Sequence[BucketSlice]) -> None:
        self.cut = len(slices) > 1
        parts = [ViewPart(name, tuple(source.shape))]
        if self.cut:
            parts = [ViewPart(name, (own.length,), Elements(None, own.start, own.length)) for own in slices]
        box = Box.whole(source.shape)
        if isinstance(source, DTensor):
            layout = dtensor_layout(source, dist.get_rank())
            box = layout.boxes[layout.grid.find(dist.get_rank())[1]]
        super().__init__(name, source, parts, box)
        self.sharded = self.sharded and not self.cut

    def _state_of(self, state: Mapping[str, Any], part: ViewPart) -> State:
        return super()._state_of(state, part) if self.cut else dict(state)

    def state_out(self, states: Sequence[State], whole_of: WholeOf) -> State:
        return super().state_out(states, whole_of) if self.cut else states[0]
