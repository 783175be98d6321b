"""The forward and backward pass of a model around a step under ZeRO-1, as loads of its buckets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from canzona_compile.analysis.roofline import TYPICAL
from canzona_compile.data_parallel.engine import GatherAt
from canzona_compile.ir.bucket import Bucket
from canzona_compile.machine.hardware import Hardware
from canzona_compile.simulation.model_passes import (
    BucketLoad,
    SimulatedPass,
    backward_pass,
    bucket_load,
    forward_pass,
)
from canzona_compile.tools.planning.mesh import Mesh
from canzona_compile.tools.planning.weights import Model, ModelWeight

TOKENS = 8192  # of a data-parallel rank in a step: 4 sequences of 2048


@dataclass(frozen=True, slots=True)
class Passes:
    """What decides how long the passes of a model take.

    Attributes:
        tokens: how many a data-parallel rank trains on per step.
        gather: when parameters are gathered, see `zero1`.
    """

    model: Model
    mesh: Mesh
    hardware: Hardware
    tokens: int
    gather: GatherAt

    def around(self, buckets: Sequence[Bucket]) -> tuple[SimulatedPass, SimulatedPass]:
        """Simulate the backward pass before a step and the forward pass after it."""
        loads, ranks = self.loads(buckets), buckets[0].ranks
        head = self.seconds(self.tied)
        return (
            backward_pass(loads, ranks, self.hardware, 2 * head),
            forward_pass(loads, ranks, self.hardware, self.gather == "forward", head),
        )

    def loads(self, buckets: Sequence[Bucket]) -> list[BucketLoad]:
        """The load of each bucket, from the elements whose products the modules compute."""
        used = {weight.name: self.used(weight) for weight in self.model.everything}
        found = []
        for bucket in buckets:
            forward = self.seconds(sum(part.length * used[part.name] for part in bucket.slices))
            found.append(bucket_load(bucket, forward, 2 * forward, self.hardware))
        return found

    def seconds(self, elements: float) -> float:
        """Seconds of a forward pass through so many elements of weights: a product and a sum for each token."""
        return 2 * elements * self.tokens / self.hardware.product_rate("bfloat16", TYPICAL)

    def used(self, weight: ModelWeight) -> float:
        """How often a token uses each element of a weight in a product, on average."""
        if weight.lookup or len(weight.shape) < 2:
            return 0.0
        return self.routed if weight.expert is not None else 1.0

    @property
    def routed(self) -> float:
        """The fraction of the experts that a token meets; 1 if unknown."""
        dense = sum(math.prod(w.shape) for w in self.model.weights if w.expert is None)
        experts = self.model.elements - dense
        if not (experts and self.model.active):
            return 1.0
        table = next((math.prod(w.shape) for w in self.model.everything if w.lookup), 0)
        return (self.model.active - dense - table) / experts

    @property
    def tied(self) -> float:
        """Elements of an embedding that is the head as well, on one rank; 0 if there is a head of its own."""
        tables = [w for w in self.model.everything if w.lookup]
        heads = {w.shape for w in self.model.everything if not w.lookup}
        return sum(math.prod(w.shape) for w in tables[:1] if w.shape not in heads) / self.mesh.size("tp")
