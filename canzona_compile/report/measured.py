"""What steps are predicted to take and what they took, if `measure` was called.

The predictions are the simulation's, and there are no others in a report. Beside measured steps they stand only if the
rates of this machine were measured, too. On CPU the host's bookkeeping is part of the simulation's prepare and is taken
out of it here, because a clock sees it elsewhere. On a device it runs beside the other phases.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from canzona_compile.errors import CanzonaError
from canzona_compile.ir.step import Step
from canzona_compile.machine.hardware import Hardware, hardware_of, parsed
from canzona_compile.report.schema import MeasuredPhase, MeasuredReport
from canzona_compile.session.measuring import Measurement
from canzona_compile.simulation.engine import Span
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
        if hardware.device == "cpu":
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


OTHER = "other"
ABOUT = {  # in the order in which a step has them
    "reduce": "gradients to owners, during backward",
    "look": "finding what changed and which code runs with which numbers",
    "agree": "ranks compare this, and wait for the slowest rank",
    "plan": "making programs, or a plan, for anything new",
    "meet": "ranks that share no exchange wait for one another",
    "prepare": "elementwise work on fragments, and packing",
    "gather": "fragments to owners",
    "compute": "owners' work, with unpacking and packing",
    "scatter": "updates to fragments",
    "exchange": "updates between replicas",
    "apply": "parameters and state are written",
    "stream": "a stream waits for another stream",
    "local": "parameters without communication",
    "gather params": "parameters from owners to all ranks",
    OTHER: "the rest of the step",
}


def measured_report(measurement: Measurement | None, reported: Step) -> MeasuredReport | None:
    """Sum up a measurement.

    Args:
        measurement: the measured steps; None if nothing was measured.
        reported: the step that the report shows. One with buckets stands for all measured ones.

    Returns:
        The figures; None if nothing was measured.
    """
    if measurement is None:
        return None
    ranks = measurement.ranks
    count = len(measurement.steps)
    hardware = hardware_of(reported.machine)
    taken = {rank: [by_phase(acts) for acts in own.acts] for rank, own in ranks.items()}
    names = {name for steps in taken.values() for own in steps for name in own}
    steps = simulated_steps(measurement, reported)
    expected, seconds = ({}, None) if (assumed := assumed_rates(steps, hardware)) else predict_mean(steps, hardware)
    mean = statistics.fmean(s for own in ranks.values() for s in own.seconds)
    phases = tuple(
        measured_phase(name, {rank: [own.get(name, 0.0) for own in steps] for rank, steps in taken.items()}, expected)
        for name in ABOUT
        if name in names
    )
    return MeasuredReport(
        steps=count,
        ranks=len(ranks),
        clock="CUDA events, call by call" if measurement.device == "cuda" else "the clock of each rank",
        seconds=mean,
        worst_seconds=max(statistics.fmean(own.seconds[i] for own in ranks.values()) for i in range(count)),
        predicted_seconds=seconds,
        error=seconds / mean - 1 if mean and seconds is not None else None,
        exposed=statistics.fmean(s for own in ranks.values() for s in own.exposed),
        exposed_worst=max(statistics.fmean(own.exposed) for own in ranks.values()),
        overlapped=max(0.0, sum(p.mean for p in phases) - mean) if measurement.device == "cuda" else 0.0,
        assumed=assumed,
        phases=phases,
    )


def assumed_rates(steps: Sequence[Step], hardware: Hardware) -> tuple[str, ...]:
    """The names of the rates that were not measured, and on which a prediction of some steps depends."""
    if not hardware.measured:
        return hardware.assumed
    expected = predict_mean(steps, hardware)
    return tuple(name for name in hardware.assumed if predict_mean(steps, hardware.slower({name: 2.0})) != expected)


def simulated_steps(measurement: Measurement, reported: Step) -> tuple[Step, ...]:
    """The steps that stand for the measured ones: under ZeRO-1, where a rank sees its own only, the reported one."""
    ran = () if reported.buckets else tuple(step for step in measurement.steps if step is not None)
    return ran or (reported,)


def read_measured(path: str | Path) -> MeasuredReport:
    """Read the measured steps of a report that was written as JSON."""
    hint = "write it with optimizer.canzona.report().to_json() after measure()"
    try:
        found = parsed(Path(path).read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise CanzonaError(f"it cannot be read: {error}", at=str(path), hint=hint) from error
    measured = found.get("measured") if isinstance(found, dict) else None
    if measured is None:
        raise CanzonaError("it holds no measured steps", at=str(path), hint=hint)
    try:
        phases = tuple(MeasuredPhase(**one) for one in measured["phases"])
        return MeasuredReport(**{**measured, "phases": phases, "assumed": tuple(measured["assumed"])})
    except (TypeError, KeyError) as error:
        raise CanzonaError(f"its measured steps have other fields: {error}", at=str(path), hint=hint) from error


def measured_phase(name: str, taken: Mapping[int, Sequence[float]], expected: Mapping[str, float]) -> MeasuredPhase:
    """Sum up one phase.

    Args:
        taken: by rank, its seconds in each step.
        expected: predicted seconds by phase.
    """
    steps = [statistics.fmean(own) for own in zip(*taken.values(), strict=True)]
    by_rank = {rank: statistics.fmean(own) for rank, own in taken.items()}
    slowest = max(by_rank, key=by_rank.__getitem__)
    mean = statistics.fmean(steps)
    predicted = expected.get(name)
    return MeasuredPhase(
        name=name,
        about=ABOUT[name],
        mean=mean,
        median=statistics.median(steps),
        worst=max(steps),
        slowest_rank=slowest,
        slowest=by_rank[slowest],
        skew=by_rank[slowest] / mean if mean else 1.0,
        predicted=predicted,
        error=None if predicted is None or not mean else predicted / mean - 1,
    )
