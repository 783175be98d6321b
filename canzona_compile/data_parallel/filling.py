"""Which parameters lie in which buckets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from canzona_compile.data_parallel.fragment import Fragment
from canzona_compile.data_parallel.model_plan import ModelPlan
from canzona_compile.ir.bucket import Bucket, BucketSlice
from canzona_compile.session.plan import BoundParam


class Filling:
    """Buckets, and the parameters of which they hold slices.

    The slices of a parameter lie in one bucket, but the pieces of a fused parameter may lie in several.

    Attributes:
        fragments: the parameters, by name, in the order of the model.
        buckets: the buckets.
        names: for each bucket, the names of its parameters.
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
    def of(cls, joint: ModelPlan, params: Mapping[str, nn.Parameter], rank: int) -> Filling:
        """Find the filling of a plan.

        Args:
            joint: the plan.
            params: the parameters that are trained, by name, in the order of the model.
            rank: the position of this rank among the data-parallel ranks.
        """
        slices: dict[str, list[BucketSlice]] = {}
        for part in (part for bucket in joint.step.buckets for part in bucket.slices):
            slices.setdefault(part.name, []).append(part)
        by_param: dict[str, list[BoundParam]] = {}
        for b in (b for bound in joint.bound for b in bound.values()):
            by_param.setdefault(b.name, []).append(b)
        fragments = {}
        for name, param in params.items():
            own = by_param[name]
            parts = [part for b in own for part in slices[b.task.name]]
            fragments[name] = Fragment(name, param, parts, rank, own[0].stand_in, own[0].division)
        return cls(fragments, joint.step.buckets)

    def holder(self, part: BucketSlice) -> Fragment:
        """The parameter that a slice is part of."""
        return self._holders[part.name]

    def part(self, index: int, names: frozenset[str]) -> Bucket:
        """What a bucket holds of some parameters, as a bucket; the bucket itself if it holds no others.

        Args:
            index: the position of the bucket.
            names: the parameters, those of one optimizer; the result is kept.
        """
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
