"""Consecutive elements of a parameter, each slice shown as a parameter of its own.

The elements of a parameter are in one flat line, which may be cut anywhere if the optimizer's work is elementwise. A
parameter that is not cut is one slice, which is shown in its own shape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from canzona_compile.ir.bucket import BucketSlice
from canzona_compile.ir.layout import Box, dtensor_layout
from canzona_compile.views.elements import Elements
from canzona_compile.views.view import ParamView, State, ViewPart, WholeOf


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
