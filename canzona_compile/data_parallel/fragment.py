"""Parameters as buckets see them: the elements that this rank holds, slice by slice.

The elements of a parameter are in one flat line, which may be cut anywhere. Of a fused parameter every slice is the
rows of one piece, whose rows need not be neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from canzona_compile.capture.twin import marks_of
from canzona_compile.data_parallel.gradient import ReducedGradient
from canzona_compile.errors import CanzonaError, UnsupportedLayout
from canzona_compile.ir.bucket import BucketSlice
from canzona_compile.ir.layout import local_part
from canzona_compile.ir.sharding import Sharding
from canzona_compile.session.division import Division, Piece, shares_memory
from canzona_compile.session.stand_in import StandIn


class Fragment:
    """One parameter of the model, and what this rank does with it.

    Attributes:
        name: the name of the parameter.
        param: the parameter.
        sharding: how it is divided beside the data-parallel ranks; None if this rank holds it whole.
        stand_in: what stands for it in plans, if it is a plain tensor that is a fragment; None otherwise.
        division: how it divides into logical matrices; None if it is one.
        pieces: these matrices, by the name of their slice.
        owned: the slices of which this rank is the owner.
        slices: all of its slices, those of other owners included.
        doubles: for each owned slice, the parameter that the optimizer steps in place of `param`. It shares the memory
            of the slice, unless that is a piece whose rows are no neighbours: then it is a copy. If the parameter is
            one matrix that is not cut, its double has its shape.
    """

    def __init__(
        self,
        name: str,
        param: nn.Parameter,
        slices: Sequence[BucketSlice],
        rank: int,
        stand_in: StandIn | None = None,
        division: Division | None = None,
    ) -> None:
        """Find what this rank owns.

        Args:
            name: the name of the parameter.
            param: the parameter.
            slices: all of its slices.
            rank: the position of this rank among the data-parallel ranks.
            stand_in: what stands for it, if it is a plain tensor that is a fragment.
            division: how it divides into logical matrices, if it is fused.
        """
        self.name, self.param, self.slices = name, param, tuple(slices)
        self.stand_in, self.division = stand_in, division
        self.sharding = None if stand_in is None else stand_in.tiling.sharding
        if isinstance(param, DTensor):
            self.sharding = Sharding(param.device_mesh, tuple(param.placements))
        self.pieces: Mapping[str, Piece] = {} if division is None else {p.task: p for p in division.pieces}
        self.owned = tuple(part for part in slices if part.owner == rank)
        self._address = self._local().data_ptr()
        self.doubles = tuple(self._double(part) for part in self.owned)

    @property
    def cut(self) -> bool:
        """Whether it is one matrix that has several slices, so that none of them has its shape."""
        return self.division is None and len(self.slices) > 1

    @property
    def spread(self) -> bool:
        """Whether several slices, or fragments along a mesh dim, make it up."""
        return len(self.slices) > 1 or (self.sharding is not None and bool(self.sharding.cutting_dims))

    # -- elements ----------------------------------------------------------------------------------

    def values(self) -> Tensor:
        """The values that this rank holds.

        Raises:
            CanzonaError: the memory of the parameter was replaced since ownership was planned.
        """
        values = self._local()
        if values.data_ptr() != self._address:
            raise CanzonaError(
                "the memory of the parameter was replaced after zero1()",
                at=self.name,
                hint="call zero1 after the model has its device, dtype and layout; change values in place",
            )
        return values

    def _local(self) -> Tensor:
        values = local_part(self.param).detach()
        if not values.is_contiguous():
            raise UnsupportedLayout(
                f"the parameter is not contiguous: strides {values.stride()} of {list(values.shape)}",
                at=self.name,
                hint="make it contiguous before zero1()",
            )
        return values

    def take(self, values: Tensor, part: BucketSlice) -> Tensor:
        """Take the elements of a slice out of a contiguous tensor shaped like the fragment.

        Returns:
            The elements in one dim: a view, or a copy if the rows of a piece are no neighbours.
        """
        if part.name in self.pieces:
            return self.pieces[part.name].of(values).view(-1)
        return values.view(-1)[part.start : part.stop]

    def put(self, values: Tensor, part: BucketSlice, elements: Tensor) -> None:
        """Write the elements of a slice into a contiguous tensor shaped like the fragment."""
        if part.name in self.pieces:
            self.pieces[part.name].put(values, elements)
        else:
            values.view(-1)[part.start : part.stop] = elements

    def gradient(self) -> Tensor | None:
        """The gradient that backward left on this rank, contiguous; None if there is none.

        A DTensor is laid out like the parameter first, which is a collective of its mesh if it was not.

        Raises:
            CanzonaError: the gradient does not fit the parameter.
        """
        grad = self.param.grad
        if grad is None:
            return None
        if isinstance(grad, DTensor) and isinstance(self.param, DTensor) and grad.placements != self.param.placements:
            # Tensor parallelism leaves sums over its ranks to be taken where a parameter saw some of the work only.
            grad = self.param.grad = grad.redistribute(placements=self.param.placements)
        own = local_part(grad)
        if grad.layout is not torch.strided or own.dtype != self.param.dtype or own.shape != self._local().shape:
            raise CanzonaError(
                f"the gradient is {grad.layout} {own.dtype} {list(own.shape)}, "
                f"the parameter {self.param.dtype} {list(self._local().shape)}",
                at=self.name,
                hint="leave dtype, shape and layout of gradients as backward makes them; reduce_dtype= is for the wire",
            )
        return own.contiguous()

    # -- doubles -----------------------------------------------------------------------------------

    def _double(self, part: BucketSlice) -> nn.Parameter:
        if self.division is not None:
            return self.division.param_of(self.pieces[part.name])
        values = self._local()
        return nn.Parameter(self.take(values, part) if self.cut else laid_out_like(values, self.param))

    def lend_marks(self) -> None:
        """Give each double the attributes that users gave to the parameter."""
        if marks := marks_of(self.param):
            for double in self.doubles:
                vars(double).update(marks)

    def lend(self) -> None:
        """Give doubles that are copies the values of their slices, and all of them gradients, if there is one."""
        for part, double in zip(self.owned, self.doubles, strict=True) if self.pieces else ():
            local, values = local_part(double), self.values()
            if not shares_memory(local, values):
                local.copy_(self.take(values, part).view(local.shape))
        grad = self.param.grad
        if grad is None:
            return
        if isinstance(grad, ReducedGradient):
            parts: Sequence[Tensor] = grad.parts
        else:  # the zeros of a dummy step
            whole = local_part(grad).contiguous()
            parts = [self.take(whole, part) for part in self.owned]
        for double, elements in zip(self.doubles, parts, strict=True):
            double.grad = laid_out_like(elements.view(local_part(double).shape), double)

    def take_back(self) -> None:
        """Write doubles that are copies back to the parameter, and take the gradients of all doubles away."""
        for part, double in zip(self.owned, self.doubles, strict=True):
            double.grad = None
            if part.name in self.pieces:
                self.pieces[part.name].put(self.values(), local_part(double))


def laid_out_like(local: Tensor, model: Tensor) -> Tensor:
    """A fragment as a DTensor that is laid out like another tensor, if that is one."""
    if not isinstance(model, DTensor):
        return local
    mesh, placements, stride = model.device_mesh, model.placements, model.stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=model.shape, stride=stride)
