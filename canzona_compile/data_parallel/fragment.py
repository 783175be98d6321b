"""Parameters as buckets see them: the elements that this rank holds, in one flat line."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from canzona_compile.capture.twin import marks_of
from canzona_compile.data_parallel.gradient import ReducedGradient
from canzona_compile.errors import CanzonaError, UnsupportedLayout
from canzona_compile.ir.bucket import BucketSlice
from canzona_compile.ir.layout import local_part
from canzona_compile.ir.sharding import Sharding


class Fragment:
    """One parameter of the model, and what this rank does with it.

    Attributes:
        name: the name of the parameter.
        param: the parameter.
        sharding: how it is divided beside the data-parallel ranks; None if this rank holds it whole.
        owned: the slices of which this rank is the owner.
        slices: all of its slices, those of other owners included.
        doubles: for each owned slice, the parameter that the optimizer steps in place of `param`: it shares the memory
            of the slice. If the parameter is not cut, its double has its shape.
    """

    def __init__(
        self,
        name: str,
        param: nn.Parameter,
        slices: Sequence[BucketSlice],
        rank: int,
        sharding: Sharding | None = None,
    ) -> None:
        """Find what this rank owns.

        Args:
            name: the name of the parameter.
            param: the parameter.
            slices: all of its slices.
            rank: the position of this rank among the data-parallel ranks.
            sharding: what is known of a plain tensor that is a fragment; the type of a DTensor tells it.
        """
        self.name, self.param, self.slices = name, param, tuple(slices)
        self.sharding = sharding
        if isinstance(param, DTensor):
            self.sharding = Sharding(param.device_mesh, tuple(param.placements))
        self.owned = tuple(part for part in slices if part.owner == rank)
        self._address = self._values().data_ptr()
        self.doubles = tuple(self._double(part) for part in self.owned)

    @property
    def cut(self) -> bool:
        """Whether several ranks own slices of it."""
        return len(self.slices) > 1

    @property
    def spread(self) -> bool:
        """Whether no rank holds all of it: it has several owners, or a mesh dim cuts it."""
        return self.cut or (self.sharding is not None and bool(self.sharding.cutting_dims))

    def flat(self) -> Tensor:
        """The values that this rank holds, in one dim, as a view.

        Raises:
            CanzonaError: the memory of the parameter was replaced since ownership was planned.
        """
        values = self._values()
        if values.data_ptr() != self._address:
            raise CanzonaError(
                "the memory of the parameter was replaced after zero1()",
                at=self.name,
                hint="call zero1 after the model has its device, dtype and layout; change values in place",
            )
        return values.view(-1)

    def _values(self) -> Tensor:
        values = local_part(self.param).detach()
        if not values.is_contiguous():
            raise UnsupportedLayout(
                f"the parameter is not contiguous: strides {values.stride()} of {list(values.shape)}",
                at=self.name,
                hint="make it contiguous before zero1()",
            )
        return values

    def gradient(self) -> Tensor | None:
        """The gradient that backward left on this rank, in one dim; None if there is none.

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
        if grad.layout is not torch.strided or own.dtype != self.param.dtype or own.shape != self._values().shape:
            raise CanzonaError(
                f"the gradient is {grad.layout} {own.dtype} {list(own.shape)}, "
                f"the parameter {self.param.dtype} {list(self._values().shape)}",
                at=self.name,
                hint="leave dtype, shape and layout of gradients as backward makes them; reduce_dtype= is for the wire",
            )
        return own.reshape(-1)

    def _double(self, part: BucketSlice) -> nn.Parameter:
        values = self.flat()[part.start : part.stop]
        if not self.cut:
            values = values.view_as(self._values())
            if isinstance(self.param, DTensor):
                values = self.like(values)
        return nn.Parameter(values)

    def like(self, local: Tensor) -> Tensor:
        """A fragment as a DTensor that is laid out like the parameter, if the parameter is one."""
        if not isinstance(self.param, DTensor):
            return local
        return DTensor.from_local(
            local.view_as(self._values()),
            self.param.device_mesh,
            self.param.placements,
            run_check=False,
            shape=self.param.shape,
            stride=self.param.stride(),
        )

    def lend_marks(self) -> None:
        """Give each double the attributes that users gave to the parameter."""
        if marks := marks_of(self.param):
            for double in self.doubles:
                vars(double).update(marks)

    def lend_gradients(self) -> None:
        """Give each double the gradient of its slice, if the parameter has one."""
        grad = self.param.grad
        if grad is None:
            return
        if isinstance(grad, ReducedGradient):
            parts: Sequence[Tensor] = grad.parts
        else:  # the zeros of a dummy step
            whole = local_part(grad).reshape(-1)
            parts = [whole[part.start : part.stop] for part in self.owned]
        for double, part in zip(self.doubles, parts, strict=True):
            double.grad = self.like(part) if isinstance(double, DTensor) else part.view_as(double)

    def drop_gradients(self) -> None:
        """Take the gradients of the doubles away."""
        for double in self.doubles:
            double.grad = None
