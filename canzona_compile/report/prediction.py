"""What steps are predicted to take. The report shows no other prediction than this one, by the simulation.

On CPU the host's bookkeeping is part of the simulation's prepare and is taken out of it here, because a clock sees it
elsewhere. On a device it runs beside the other phases.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from canzona_compile.ir.step import Step
from canzona_compile.machine.hardware import Hardware
from canzona_compile.simulation.figures import Span
from canzona_compile.simulation.model_passes import backward_pass, bucket_load, forward_pass
from canzona_compile.simulation.simulate import matrices_by_rank, simulate


@dataclass(frozen=True, slots=True)
class Prediction:
    """A simulated step.

    Attributes:
        seconds: of the step; under ZeRO-1 with the reductions before it and the gathers after it.
        phases: seconds of the mean rank, by phase.
        spans: what the rank that computes most does in the step, by begin.
    """

    seconds: float
    phases: Mapping[str, float]
    spans: tuple[Span, ...]


def predict(step: Step, hardware: Hardware) -> Prediction:
    """Simulate a step, at least SCHEDULED, with the rates of a machine."""
    found = simulate(step, hardware)
    phases = by_phase(dict(found.acts))
    if (held := matrices_by_rank(step)) and "prepare" in phases:
        phases["look"] = hardware.host * statistics.fmean(held.values())
        if not hardware.overlap:
            phases["look"] = min(phases["prepare"], phases["look"])
            phases["prepare"] -= phases["look"]
    seconds = found.seconds
    if step.buckets:
        loads, ranks = [bucket_load(b, 0.0, 0.0, hardware) for b in step.buckets], step.buckets[0].ranks
        phases["reduce"] = backward_pass(loads, ranks, hardware).seconds
        phases["gather params"] = forward_pass(loads, ranks, hardware, overlapped=False).seconds
        seconds += phases["reduce"] + phases["gather params"]
    by_work = sorted(found.ranks, key=lambda one: -one.compute)
    spans = tuple(span for one in by_work[:1] for span in found.spans if span.rank == one.rank)
    return Prediction(seconds, phases, spans)


def predict_mean(steps: Sequence[Step], hardware: Hardware) -> tuple[dict[str, float], float]:
    """Predict the mean of some steps.

    Args:
        steps: the steps, of which many may be the same one.
        hardware: the rates.

    Returns:
        Seconds by phase, and seconds of a whole step.
    """
    known: dict[int, Prediction] = {}
    total: dict[str, float] = defaultdict(float)
    whole = 0.0
    for step in steps:
        if id(step) not in known:
            known[id(step)] = predict(step, hardware)
        found = known[id(step)]
        whole += found.seconds / len(steps)
        for name, own in found.phases.items():
            total[name] += own / len(steps)
    return dict(total), whole


def by_phase(acts: Mapping[str, float]) -> dict[str, float]:
    """Add up acts of a measured or simulated step by phase: "start gather" and "wait gather" are both of "gather"."""
    found: dict[str, float] = defaultdict(float)
    for act, seconds in acts.items():
        found[act.removeprefix("start ").removeprefix("wait ")] += seconds
    return dict(found)
