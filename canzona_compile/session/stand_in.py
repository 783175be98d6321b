"""Stand-ins: DTensors in place of plain parameters that are fragments.

A stand-in shares the memory of its fragment and has the shape of the whole tensor, so that all that comes after binding
sees a DTensor like any other. Its fragments lie where their sizes say and not where torch would cut, so no DTensor
operation may run on it but elementwise ones, which run on fragments.

While a plan is in use, `optimizer.state` holds the state of a stand-in under the stand-in. Portable state is held
under the plain parameter. A leaf that is laid out like the whole tensor is then a plain fragment of the parameter's own
shape; all other leaves are whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from canzona_compile.capture.leaves import LeafPath, keys_of, leaf_name, paths_of, read
from canzona_compile.compat.torch_private import pytree
from canzona_compile.errors import UnsupportedLayout
from canzona_compile.ir.layout import Box
from canzona_compile.ir.sharding import Tiling
from canzona_compile.split import Split

State = dict[str, Any]


class StandIn:
    """The DTensor that stands for one plain parameter.

    Attributes:
        name: the name of the parameter.
        fragment: the parameter.
        tiling: where the fragments of all ranks lie in the whole tensor.
        box: the region that this rank holds.
        param: the stand-in.
        whole_leaves: the names of the leaves of the state that are whole although they have the fragment's shape.
    """

    def __init__(self, name: str, fragment: Tensor, tiling: Tiling, box: Box) -> None:
        """Make a stand-in, with the gradient that the parameter has now."""
        self.name, self.fragment, self.tiling, self.box = name, fragment, tiling, box
        self.param = torch.nn.Parameter(tiling.like(fragment.detach()), requires_grad=fragment.requires_grad)
        self.whole_leaves: frozenset[str] = frozenset()
        self._grad: Tensor | None = None
        self.take()

    def of(self, fragment: Tensor) -> StandIn:
        """A stand-in for another parameter of the same size, which holds the same region of the same tensor."""
        return StandIn(self.name, fragment, self.tiling, self.box)

    def strided(self, split: Split | None) -> UnsupportedLayout | None:
        """The error for a fragment that holds shares of several parts, unless `split` has each part as a matrix.

        The fragments side by side are then another order of the whole tensor's entries.
        """
        sharding = self.tiling.sharding
        ranks = sharding.mesh.size()
        if sharding.stride == 1 or (split is not None and (split.interleaved == ranks or split.order is not None)):
            return None
        return UnsupportedLayout(
            f"each fragment holds a share of {sharding.stride} parts (partition_stride), so that the fragments side by "
            "side are no matrix of the model",
            at=self.name,
            hint='name the parts: split={"*.fc1.weight": Split({"gate": ..., "up": ...}, '
            f"interleaved={ranks})}}, with as many blocks as there are ranks",
        )

    # -- around a step -----------------------------------------------------------------------------

    def take(self) -> None:
        """Give the stand-in the current values and the gradient of the parameter."""
        local: Any = self.param
        local._local_tensor = self.fragment.detach()
        grad = self.fragment.grad
        if grad is None:
            self.param.grad = None
            return
        if grad.dtype != self.param.dtype:
            self.param.grad_dtype = grad.dtype
        if self._grad is None or self._grad.dtype != grad.dtype:
            self._grad = self.tiling.like(grad.detach())
        else:  # a step makes no new DTensor: that takes the host longer than all else here
            own: Any = self._grad
            own._local_tensor = grad.detach()
        self.param.grad = self._grad

    def give_back(self) -> None:
        """Drop the gradient of the stand-in; its values are those of the parameter already."""
        self.param.grad = None

    # -- state -------------------------------------------------------------------------------------

    def lookalikes(self, state: Mapping[str, Any]) -> dict[str, LeafPath]:
        """Find the leaves that have the shape of this rank's fragment and not of the whole, by name.

        Most of them are fragments; a whole leaf, such as a small preconditioner, may have that shape too.
        """
        paths = paths_of(state) if self.box.size != self.tiling.shape else {}
        return {name: path for name, path in paths.items() if self._fits(read(state, path))}

    def _fits(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.ndim > 0 and value.shape == self.fragment.shape

    def taken(self, state: Mapping[str, Any]) -> State:
        """Turn portable state of the parameter into that of the stand-in, in which fragments are DTensors."""

        def taken(path: Any, value: Any) -> Any:
            whole = leaf_name(keys_of(path)) in self.whole_leaves
            return self.tiling.like(value) if self._fits(value) and not whole else value

        found: State = pytree.tree_map_with_path(taken, dict(state))
        return found

    def given_back(self, state: Mapping[str, Any]) -> State:
        """Turn portable state of the stand-in into that of the parameter, the inverse of `taken`."""

        def given(value: Any) -> Any:
            if isinstance(value, DTensor):
                return value._local_tensor
            if isinstance(value, Tensor) and value.ndim and tuple(value.shape) == self.tiling.shape != self.box.size:
                return value[self.box.slices()].clone(memory_format=torch.contiguous_format)
            return value

        found: State = pytree.tree_map(given, dict(state))
        return found
