"""The rates of this machine that explain measured steps.

A phase that took f times as long as predicted makes the rates behind it f times as slow; that is repeated until the
simulation of the same steps agrees, because ranks share processors and wait for one another. So a curve of rates keeps
its form and is right at the sizes of this model. `calibrate` measures other sizes too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from canzona_compile.ir.step import Step
from canzona_compile.machine.hardware import ONE_NODE, Hardware, hardware_of, processors
from canzona_compile.report.prediction import predict_mean
from canzona_compile.report.schema import MeasuredReport
from canzona_compile.report.units import plural

ROUNDS = 20
LARGEST = 1e3  # times as slow, or as fast, as assumed
PHASES: Mapping[str, tuple[str, ...]] = {
    "compute": ("compute",),
    "elementwise": ("prepare", "apply"),
    "wires": ("gather", "scatter", "exchange", "reduce", "gather params"),
}
FIELDS: Mapping[str, tuple[str, ...]] = {
    "compute": ("products", "factorizations", "product_calls"),
    "elementwise": ("bandwidth", "transposed", "launch"),
    "wires": ("node",),
}


def learn(report: MeasuredReport | None, steps: Sequence[Step], ranks: int) -> Hardware:
    """Find rates with which the simulation of some steps takes as long as they took.

    Args:
        report: what was measured.
        steps: the steps that were measured.
        ranks: how many took part; all of them were on this machine.

    Returns:
        The rates that the plan knew, with those in their places that matter for these steps.
    """
    assert report is not None
    taken = {phase.name: phase.mean for phase in report.phases}
    base = hardware_of(steps[0].machine)
    base = replace(base, processors=processors(), ranks_per_node=max(ONE_NODE, ranks))
    matrices = max(1, len(steps[0].tasks))
    base = replace(base, host=(taken.get("look", 0.0) + taken.get("other", 0.0)) / matrices)
    wanted = {name: sum(taken.get(phase, 0.0) for phase in phases) for name, phases in PHASES.items()}
    slower = dict.fromkeys(PHASES, 1.0)
    for _ in range(ROUNDS):
        expected, _ = predict_mean(steps, base.slower(by_rate(slower)))
        for name, phases in PHASES.items():
            now = sum(expected.get(phase, 0.0) for phase in phases)
            if now and wanted[name]:
                slower[name] = min(LARGEST, max(1 / LARGEST, slower[name] * wanted[name] / now))
    found = base.slower(by_rate(slower))
    names = [field for name, fields in FIELDS.items() for field in fields if matters(base, steps, name, field)]
    how = f"learnt from {plural(report.steps, 'step')} of {len(steps[0].tasks)} matrices on {ranks} ranks, by profile"
    values = found.to_dict()
    measured: dict[str, Any] = {name: values[name] for name in (*names, "host")}
    shape = {
        "name": f"{base.device}-{base.processors}-learnt",
        **{name: values[name] for name in ("device", "backend", "ranks_per_node", "processors", "overlap")},
    }
    return base.with_measured(shape, measured, dict.fromkeys(measured, how), "profile")


def matters(hardware: Hardware, steps: Sequence[Step], group: str, field: str) -> bool:
    """Tell whether the predicted phases of a group depend on one of its rates."""
    other = hardware.slower({field: 2.0})
    before, after = (predict_mean(steps, own)[0] for own in (hardware, other))
    return any(before.get(phase) != after.get(phase) for phase in PHASES[group])


def by_rate(slower: Mapping[str, float]) -> dict[str, float]:
    """How many times as slow each rate is, if that is given for each group."""
    return {field: times for group, times in slower.items() for field in FIELDS[group]}
