"""Parameters as buckets see them: which lie in which, and the elements that this rank holds, slice by slice.

The elements of a parameter are in one flat line, which may be cut anywhere. Of a fused parameter every slice is the
rows of one piece, whose rows need not be neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from canzona_compile.data_parallel.gradient import ReducedGradient
from canzona_compile.data_parallel.model_plan import ModelPlan
from canzona_compile.errors import CanzonaError, UnsupportedLayout
from canzona_compile.ir.bucket import Bucket, BucketSlice
from canzona_compile.ir.sharding import Sharding
from canzona_compile.session.params import of_odd_class
from canzona_compile.session.plan import BoundParam
from canzona_compile.tensors import any_attributes, local_part, plain_attributes
from canzona_compile.views.pieces import SlicesView
from canzona_compile.views.view import ParamView


class Fragment:
    """One parameter of the model, and what this rank does with it.

    Attributes:
        sharding: how it is sharded over ranks that are not data-parallel ones; None if this rank holds it whole.
        stand_in: shows it in plans, if it is a plain tensor that is a fragment; None otherwise.
        division: shows its logical matrices; None if it is one.
        view: shows the slices that this rank owns, as *doubles*, which the optimizer steps in place of `param`. A
            double shares the memory of its slice, unless that is a piece whose rows are not consecutive: then it is a
            copy. If the parameter is one matrix that is not cut, its double has its shape.
        owned: the slices of which this rank is the owner, in the order of the doubles.
        slices: all of its slices, those of other owners included.
        parts: by the key of a slice, what it is to the view. It takes elements out of a contiguous tensor that is
            shaped like the fragment.
    """

    def __init__(self, bound: BoundParam, param: nn.Parameter, slices: Sequence[BucketSlice], rank: int) -> None:
        """Find what this rank owns.

        Args:
            bound: the parameter, or a piece of it, as it is planned for the model.
            rank: the position of this rank among the data-parallel ones.
        """
        self.name, self.param, self.slices = bound.name, param, tuple(slices)
        self.stand_in, self.division = bound.stand_in, bound.division
        self.sharding = None if self.stand_in is None else self.stand_in.tiling.sharding
        if isinstance(param, DTensor):
            self.sharding = Sharding(param.device_mesh, tuple(param.placements))
        self._address = self._local().data_ptr()
        self.view: ParamView = SlicesView(self.name, param, slices) if self.division is None else self.division
        self.parts = {own.key: part for own, part in zip(slices, self.view.parts, strict=True)}
        self.owned = tuple(part for part in slices if part.owner == rank)
        self.view.show([self.parts[part.key] for part in self.owned])

    @property
    def doubles(self) -> tuple[nn.Parameter, ...]:
        """The parameters that the optimizer steps."""
        return self.view.params

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
        """The values that this rank holds."""
        values = self._local()
        if values.data_ptr() != self._address:
            raise CanzonaError(
                "the storage of the parameter was replaced after zero1()",
                at=self.name,
                hint="move and cast the model before zero1(); afterwards, change parameters only in place",
            )
        return values

    def _local(self) -> Tensor:
        if odd := of_odd_class(self.name, self.param, "zero1 sends slices of plain tensors"):
            raise odd
        values = local_part(self.param).detach()
        if not values.is_contiguous():
            raise UnsupportedLayout(
                f"the parameter of shape {list(values.shape)} is not contiguous: its strides are {values.stride()}",
                at=self.name,
                hint="set param.data = param.data.contiguous() before zero1()",
            )
        return values

    def gradient(self) -> Tensor | None:
        """The gradient that backward left on this rank, contiguous; None if there is none.

        A DTensor is laid out like the parameter first, which is a collective of its mesh if it was not.
        """
        grad = self.param.grad
        if grad is None:
            return None
        if isinstance(grad, DTensor) and isinstance(self.param, DTensor) and grad.placements != self.param.placements:
            # Under tensor parallelism, gradients of replicated parameters may be partial sums over its ranks.
            grad = self.param.grad = grad.redistribute(placements=self.param.placements)
        own = local_part(grad)
        if grad.layout is not torch.strided or own.dtype != self.param.dtype or own.shape != self._local().shape:
            raise CanzonaError(
                f"the gradient is {grad.layout} {own.dtype} {list(own.shape)}, "
                f"but the parameter is {self.param.dtype} {list(self._local().shape)}",
                at=self.name,
                hint="do not change the dtype, shape or layout of gradients; to reduce in another dtype, pass "
                "reduce_dtype=",
            )
        return own.contiguous()

    # -- doubles -----------------------------------------------------------------------------------

    def lend_marks(self) -> None:
        """Give each double the attributes that users gave to the parameter, and no others."""
        if any_attributes((self.param, *self.doubles)):
            marks = plain_attributes(self.param)
            for double in self.doubles:
                for gone in plain_attributes(double).keys() - marks.keys():
                    delattr(double, gone)
                vars(double).update(marks)

    def lend(self) -> None:
        """Give doubles that are copies the values of their slices, and all of them gradients, if there is one."""
        if self.division is not None:
            self.values()  # raises if the storage was replaced
        self.view.take_values()
        grad = self.param.grad
        if isinstance(grad, ReducedGradient):
            self.view.lend(grad.parts)
        elif grad is not None:  # the zeros of a dummy step
            whole = local_part(grad).contiguous()
            self.view.lend([part.of(whole) for part in self.view.shown])

    def take_back(self) -> None:
        """Write doubles that are copies back to the parameter, and take the gradients of all doubles away."""
        self.view.give_back()


class Filling:
    """Buckets, and the parameters of which they hold slices.

    The slices of a parameter lie in one bucket, but the pieces of a fused parameter may lie in several.

    Attributes:
        fragments: the parameters, by name, in the order of the model.
        buckets_of: for each parameter, the indices of its buckets.
    """

    def __init__(self, fragments: Mapping[str, Fragment], buckets: Sequence[Bucket]) -> None:
        self.fragments, self.buckets = fragments, tuple(buckets)
        self._holders = {part.name: fragment for fragment in fragments.values() for part in fragment.slices}
        self.names = [tuple(dict.fromkeys(self._holders[n].name for n in bucket.names)) for bucket in self.buckets]
        self._index = {name: bucket.index for bucket in self.buckets for name in bucket.names}
        self.buckets_of = {
            name: frozenset(self._index[part.name] for part in fragment.slices) for name, fragment in fragments.items()
        }
        self._parts: dict[tuple[int, frozenset[str]], Bucket] = {}

    @classmethod
    def of(cls, plan: ModelPlan, params: Mapping[str, nn.Parameter], rank: int) -> Filling:
        """Find the filling of a plan, of the parameters that are trained, in the order of the model."""
        slices: dict[str, list[BucketSlice]] = {}
        for part in (part for bucket in plan.step.buckets for part in bucket.slices):
            slices.setdefault(part.name, []).append(part)
        by_param: dict[str, list[BoundParam]] = {}
        for b in (b for bound in plan.bound for b in bound.values()):
            by_param.setdefault(b.name, []).append(b)
        fragments = {}
        for name, param in params.items():
            own = by_param[name]
            parts = [part for b in own for part in slices[b.task.name]]
            fragments[name] = Fragment(own[0], param, parts, rank)
        return cls(fragments, plan.step.buckets)

    def holder(self, part: BucketSlice) -> Fragment:
        """The parameter that a slice is part of."""
        return self._holders[part.name]

    def part(self, index: int, names: frozenset[str]) -> Bucket:
        """What a bucket holds of the parameters of an optimizer, as a bucket; the bucket itself if it has no others."""
        bucket = self.buckets[index]
        if names.issuperset(self.names[index]):
            return bucket
        if (index, names) not in self._parts:
            wanted = [part for part in bucket.slices if self._holders[part.name].name in names]
            self._parts[index, names] = bucket.of(wanted)
        return self._parts[index, names]

    def bucket_of(self, part: BucketSlice) -> Bucket:
        """The bucket that a slice lies in."""
        return self.buckets[self._index[part.name]]
