"""Works out the figures of a plan for ZeRO-1: buckets, bytes over the data-parallel ranks, and the three phases."""

from __future__ import annotations

from collections.abc import Sequence

from canzona_compile.ir.bucket import Bucket
from canzona_compile.report.schema import LoadReport
from canzona_compile.simulation.figures import Simulation
from canzona_compile.tools.planning.figures import PhaseForecast, Zero1Forecast
from canzona_compile.tools.planning.passes import Passes


def zero1_forecast(
    buckets: Sequence[Bucket], loads: Sequence[LoadReport], simulation: Simulation, passes: Passes, shown: bool
) -> Zero1Forecast:
    """Sum up the buckets of a plan, and simulate the passes around its step.

    Args:
        buckets: those of the plan; at least one.
        loads: the FLOPs of all ranks.
        simulation: of the step.
        passes: the passes of the model.
        shown: whether to keep the spans of the passes.
    """
    elements, padding = sum(b.elements for b in buckets), sum(b.padding for b in buckets)
    ranks = len(buckets[0].ranks)
    # Every rank sends all shards but its own, in every data-parallel group.
    sent = sum(b.starts[-1] * b.dtype.itemsize for b in buckets) * (ranks - 1) * (passes.mesh.ranks // ranks)
    backward, forward = passes.around(buckets)
    step = PhaseForecast("step", simulation.seconds, max((r.exposed for r in simulation.ranks), default=0.0), 0, 0, ())
    counted = sum(b.collectives for b in buckets) if ranks > 1 else 0
    around = [
        PhaseForecast(name, own.seconds, own.exposed, sent, counted, own.spans if shown else ())
        for name, own in (("backward", backward), ("forward", forward))
    ]
    return Zero1Forecast(
        buckets=len(buckets),
        uniform=sum(b.uniform for b in buckets),
        elements=elements,
        padding=padding,
        padding_share=padding / elements,
        makespan=max((load.flops for load in loads), default=0),
        phases=(around[0], step, around[1]),
    )


def zero1_assumptions(passes: Passes) -> tuple[str, ...]:
    """List what the figures of ZeRO-1 assume, in words."""
    return (
        "only the owner's replica updates a matrix; the owners of slices update the other parameters, in no time",
        f"{passes.tokens} tokens per data-parallel rank; passes take 6 FLOPs per weight and token, at the rate of"
        " products; attention, activations and the traffic of tensor parallelism take no time",
        "an uneven bucket takes a collective per shard, one after the other",
    )
