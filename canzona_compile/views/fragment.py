"""A plain parameter that is a fragment, shown as a DTensor of the whole shape on the fragment's memory.

All that comes after binding sees a DTensor like any other. Its fragments lie where their sizes say and not where torch
would cut, so no DTensor operation may run on it but elementwise ones, which run on fragments.

In portable state a leaf that is laid out like the whole tensor is a plain fragment of the parameter's own shape; all
other leaves are whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from canzona_compile.errors import UnsupportedLayout
from canzona_compile.ir.layout import Box
from canzona_compile.ir.sharding import Tiling
from canzona_compile.ir.split import Split
from canzona_compile.replica.leaves import LeafPath, leaf_name, paths_of, read
from canzona_compile.tensors import plain_attributes
from canzona_compile.views.view import ParamView, State, ViewPart, WholeOf, rewritten


class FragmentView(ParamView):
    """Shows one plain parameter as a DTensor.

    Attributes:
        whole_leaves: the names of the leaves of the state that are whole although they have the fragment's shape.
    """

    def __init__(self, name: str, source: Tensor, tiling: Tiling, box: Box) -> None:
        """Show the parameter, with the gradient that it has now."""
        super().__init__(name, source, [ViewPart(name, tiling.shape)], box)
        self.tiling, self.sharded = tiling, True
        self.whole_leaves: frozenset[str] = frozenset()
        self.show()
        vars(self.param).update(plain_attributes(source))  # which elementwise steps read of the DTensor
        self.take()

    @property
    def param(self) -> torch.nn.Parameter:
        """The DTensor."""
        return self.params[0]

    def of(self, source: Tensor) -> FragmentView:
        """The same view of another parameter, which holds the same region of the same tensor."""
        return FragmentView(self.name, source, self.tiling, self.box)

    def labelled(self, local: Tensor, part: ViewPart) -> Tensor:
        return self.tiling.like(local.detach())

    def strided(self, split: Split | None) -> UnsupportedLayout | None:
        """The error for a fragment that holds shares of several parts, unless `split` has each part as a matrix.

        The fragments side by side are then another order of the whole tensor's entries.
        """
        sharding = self.tiling.sharding
        ranks = sharding.mesh.size()
        if sharding.stride == 1 or (split is not None and (split.interleaved == ranks or split.order is not None)):
            return None
        return UnsupportedLayout(
            f"each rank holds a share of {sharding.stride} parts (partition_stride), so its fragment is not "
            "one block of a matrix",
            at=self.name,
            hint='name the parts with split={"*.fc1.weight": Split({"gate": ..., "up": ...}, '
            f"interleaved={ranks})}}, with as many blocks as there are ranks",
        )

    # -- state -------------------------------------------------------------------------------------

    def lookalikes(self, state: Mapping[str, Any]) -> dict[str, LeafPath]:
        """Find the leaves that have the shape of this rank's fragment and not of the whole, by name.

        Most of them are fragments; a whole leaf, such as a small preconditioner, may have that shape too.
        """
        paths = paths_of(state) if self.box.size != self.tiling.shape else {}
        return {name: path for name, path in paths.items() if self._fits(read(state, path))}

    def _fits(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.ndim > 0 and value.shape == self.source.shape

    def _leaf_of(self, part: ViewPart, path: LeafPath, value: Any) -> Any:
        is_fragment = self._fits(value) and leaf_name(path) not in self.whole_leaves
        return self.tiling.like(value) if is_fragment else value

    def state_out(self, states: Sequence[State], whole_of: WholeOf) -> State:
        def given(_: LeafPath, value: Any) -> Any:
            if isinstance(value, DTensor):
                return value._local_tensor
            if isinstance(value, Tensor) and value.ndim and tuple(value.shape) == self.tiling.shape != self.box.size:
                return value[self.box.slices()].clone(memory_format=torch.contiguous_format)
            return value

        return rewritten(states[0], given)
