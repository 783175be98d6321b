"""The steps of a period, predicted one by one: SOAP, Shampoo and others do some of their work every k steps only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import lcm

from canzona_compile.ir.step import Step
from canzona_compile.ir.variant_period import VariantPeriod
from canzona_compile.passes.stagger import LONGEST
from canzona_compile.session.plan import taking

Templates = tuple[str, ...]  # of all tasks with a period, in their order


@dataclass(frozen=True, slots=True)
class PeriodForecast:
    """The predicted seconds of the steps of a period.

    Attributes:
        seconds: step by step. A common period that is longer than `stagger.LONGEST` is cut off there.
        mean: of all of them.
        worst: of the heaviest step.
    """

    seconds: tuple[float, ...]
    mean: float
    worst: float


def period_forecast(
    owned: Step, periods: Mapping[str, VariantPeriod], seconds_of: Callable[[Step], float]
) -> PeriodForecast | None:
    """Predict the steps of a period.

    Args:
        owned: the step with owners, in which every task has its heaviest variant.
        periods: by task, how its code continues from step to step.
        seconds_of: predicts an owned step.

    Returns:
        The prediction; None if every step does the same.
    """
    periodic = {t.name: periods[t.name] for t in owned.tasks if t.name in periods and periods[t.name].periodic}
    if not periodic:
        return None
    horizon = min(LONGEST, lcm(*(len(own.period) for own in periodic.values())))
    steps = [
        tuple(own.period[(number - own.start) % len(own.period)] for own in periodic.values())
        for number in range(horizon)
    ]
    groups = {task.name: task.param_group for task in owned.tasks}
    known: dict[Templates, float] = {}
    for templates in dict.fromkeys(steps):
        assignment = [(template, groups[name], [name]) for name, template in zip(periodic, templates, strict=True)]
        known[templates] = seconds_of(taking(owned, assignment))
    seconds = tuple(known[templates] for templates in steps)
    return PeriodForecast(seconds, sum(seconds) / len(seconds), max(seconds))
