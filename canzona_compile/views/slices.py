"""Consecutive elements of a parameter, each slice shown as a parameter of its own.

The elements of a parameter are in one flat line, which may be cut anywhere if the optimizer's work is elementwise. A
parameter that is not cut is one slice, which is shown in its own shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from canzona_compile.capture.leaves import LeafPath, leaf_name
from canzona_compile.errors import CanzonaError
from canzona_compile.ir.bucket import BucketSlice
from canzona_compile.ir.layout import Box, dtensor_layout
from canzona_compile.views.elements import AllElements, FlatRange
from canzona_compile.views.view import ParamView, State, ViewPart, WholeOf


class SlicesView(ParamView):
    """Shows a parameter as slices of its elements.

    Args:
        name: the name of the parameter.
        source: the parameter, contiguous.
        slices: all of its slices, in order.
    """

    def __init__(self, name: str, source: Tensor, slices: Sequence[BucketSlice]) -> None:
        self.cut = len(slices) > 1
        parts = [ViewPart(name, tuple(source.shape), AllElements())]
        if self.cut:
            parts = [ViewPart(f"{name}[{s.start}:{s.stop}]", (s.length,), FlatRange(s.start, s.stop)) for s in slices]
        box = Box.whole(source.shape)
        if isinstance(source, DTensor):
            layout = dtensor_layout(source, dist.get_rank())
            box = layout.boxes[layout.grid.find(dist.get_rank())[1]]
        super().__init__(name, source, parts, box)

    def labelled(self, local: Tensor, part: ViewPart) -> Tensor:
        return local if self.cut else super().labelled(local, part)

    def _leaf_of(self, part: ViewPart, path: LeafPath, value: Any) -> Any:
        return super()._leaf_of(part, path, value) if self.cut else value

    def _indivisible(self, path: LeafPath, value: Tensor) -> CanzonaError:
        return CanzonaError(
            f"state {leaf_name(path)!r} of shape {list(value.shape)} cannot be cut like its parameter",
            at=self.name,
            hint="load a checkpoint of this optimizer",
        )

    def state_out(self, states: Sequence[State], whole_of: WholeOf) -> State:
        return super().state_out(states, whole_of) if self.cut else states[0]

    def _joins(self, leaves: Sequence[tuple[ViewPart, Any]]) -> bool:
        return all(isinstance(v, Tensor) and tuple(v.shape) == part.shape for part, v in leaves)
