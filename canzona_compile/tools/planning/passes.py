"""What is to be planned; and under ZeRO-1 the passes of the model around the step, as loads of its buckets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from canzona_compile.analysis.roofline import TYPICAL
from canzona_compile.data_parallel.engine import GatherAt
from canzona_compile.ir.bucket import Bucket
from canzona_compile.ir.options import Options
from canzona_compile.machine.hardware import Hardware
from canzona_compile.simulation.model_passes import (
    SimulatedPass,
    backward_pass,
    bucket_load,
    forward_pass,
)
from canzona_compile.tools.planning.mesh import Mesh
from canzona_compile.tools.planning.weights import Model, ModelWeight

Updates = Literal["ddp", "zero1"]
TOKENS = 8192  # of a data-parallel rank in a step: 4 sequences of 2048


@dataclass(frozen=True, slots=True)
class Request:
    """What the user asked to plan and to predict.

    Attributes:
        updates: who applies updates over replicas: "ddp", all of them, or "zero1", the owner's alone.
        bucket_bytes: the size at which a bucket closes, see `zero1`.
        tokens: how many a data-parallel rank trains on per step.
        gather: when parameters are gathered, see `zero1`.
        rank: a global rank whose timeline to show.
        replicas: how many meshes there are, over which gradients are summed under ZeRO-1.
    """

    model: Model
    mesh: Mesh
    hardware: Hardware
    options: Options
    updates: Updates
    bucket_bytes: int
    tokens: int
    gather: GatherAt
    rank: int | None
    replicas: int = 1

    @property
    def zero1(self) -> bool:
        """Whether there are buckets."""
        return self.updates == "zero1"


def passes_around(request: Request, buckets: Sequence[Bucket]) -> tuple[SimulatedPass, SimulatedPass]:
    """Simulate the backward pass before a step and the forward pass after it."""
    model, hardware, ranks = request.model, request.hardware, buckets[0].ranks

    def seconds(elements: float) -> float:
        """Seconds of a forward pass through so many elements of weights: a product and a sum for each token."""
        return 2 * elements * request.tokens / hardware.product_rate("bfloat16", TYPICAL)

    routed = routed_share(model)
    used = {weight.name: uses(weight, routed) for weight in model.everything}
    loads = []
    alike = range(0, request.replicas * request.mesh.ranks, request.mesh.ranks)  # the ranks with the shards of rank 0
    for bucket in buckets:
        forward = seconds(sum(part.length * used[part.name] for part in bucket.slices))
        loads.append(bucket_load(bucket, forward, 2 * forward, hardware, alike))
    head = seconds(tied_elements(model) / request.mesh.size("tp"))
    return (
        backward_pass(loads, ranks, hardware, 2 * head),
        forward_pass(loads, ranks, hardware, request.gather == "forward", head),
    )


def uses(weight: ModelWeight, routed: float) -> float:
    """How often a token uses each element of a weight in a product, on average; `routed` times if an expert has it."""
    if weight.lookup or len(weight.shape) < 2:
        return 0.0
    return routed if weight.expert is not None else 1.0


def routed_share(model: Model) -> float:
    """The fraction of the experts that a token meets; 1 if unknown."""
    dense = sum(w.elements for w in model.weights if w.expert is None)
    experts = model.elements - dense
    if not (experts and model.active):
        return 1.0
    table = next((w.elements for w in model.everything if w.lookup), 0)
    return (model.active - dense - table) / experts


def tied_elements(model: Model) -> int:
    """Elements of an embedding that is the head as well; 0 if there is a head of its own."""
    table = next((w for w in model.everything if w.lookup), None)
    heads = {w.shape for w in model.everything if not w.lookup}
    return 0 if table is None or table.shape in heads else table.elements
