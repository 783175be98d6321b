"""Scenarios: the steps that a rehearsal takes, with gradients and hyperparameters that tempt an optimizer."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from canzona_compile.replica.twin import Loose

MOST_PARAMETERS = 32  # of all in the short scenario; the first ones and the last one of each group
MOST_GROUPS = 16  # of the short scenario; the first ones and the last one. The long one has four
LONG = 46  # steps of the long scenario
OTHER = (1.0, 1e12, 0.0, 1e-6)  # factors of gradients, step by step. The second one exceeds whatever a step may clip to


@dataclass(frozen=True, slots=True)
class Scenario:
    """Steps that are rehearsed.

    Attributes:
        scales: by step, the factor of the first parameter's gradient.
        rates: by step, the factor of all hyperparameters that are floats, from that step on.
        frozen: the step before which the last parameter stops to require a gradient, although it has one.
        in_place: whether every gradient is written over the one before.
        stateful: whether parameters begin with small copies of the state that they have now.
        counts: numbers that divide the sizes of small parameters if they divide the real ones.
        others: the parameters whose gradients are other ones than in this scenario without `others`, see `OTHER`.
        loose: what is scratch, new before every step, and which hyperparameters are made tensors before it.
        double: whether all floats have 64 bits, see `InDouble`.
    """

    chosen: Sequence[Sequence[int]]
    steps: int
    missing: Mapping[int, int] = field(default_factory=dict)
    scales: Mapping[int, float] = field(default_factory=dict)
    rates: Mapping[int, float] = field(default_factory=dict)
    frozen: int | None = None
    stateful: bool = False
    counts: Collection[int] = ()
    in_place: bool = False
    surges: Mapping[int, float] = field(default_factory=dict)
    others: Collection[int] = ()
    loose: Loose = field(default_factory=Loose)
    double: bool = False

    def is_odd(self, number: int) -> bool:
        """Whether a step has gradients of a size that a training may never have."""
        return number in self.scales or number in self.surges or (bool(self.others) and self.other(number) != 1.0)

    def other(self, number: int) -> float:
        """The factor of a step's gradients that are other ones: after some steps NaN, and as often huge as ordinary."""
        return float("nan") if number >= self.steps - 2 else OTHER[number % len(OTHER)]

    @property
    def params(self) -> int:
        """The number of parameters that take part."""
        return sum(map(len, self.chosen))

    def easier(self) -> list[Scenario]:
        """This scenario, then without what a step may ask for: frozen parameters, missing gradients."""
        thawed = replace(self, frozen=None)
        return [self, thawed, replace(self, missing={}), replace(thawed, missing={})]


def scenarios(numbers: Sequence[int]) -> list[Scenario]:
    """Make a short scenario with many parameters and a long one with few."""
    filled = [g for g, n in enumerate(numbers) if n]
    groups = {*filled[: MOST_GROUPS - 1], filled[-1]}
    share = max(MOST_PARAMETERS // len(groups), 3)
    many = [[*range(min(n, share) - 1), n - 1] if g in groups else [] for g, n in enumerate(numbers)]
    groups = {*filled[:3], filled[-1]}
    few = [sorted({0, n - 1}) if g in groups else [] for g, n in enumerate(numbers)]
    nan = float("nan")
    last = sum(map(len, many)) - 1
    # Near the end, because what gradients of another size leave in the state hides slight differences.
    surges = {LONG - 3: 1e6, LONG - 2: 1e-6}
    return [
        Scenario(many, 8, {1: 0, 2: last}, {4: 1e4, 5: 0.0, 7: nan}, {3: 0.5}, frozen=5),
        Scenario(
            few,
            LONG,
            {5: 0, 9: 1},
            {15: 1e6, 16: 1e-6, LONG - 1: nan},
            {20: 0.01, 30: 1e-9, 31: 1e11},
            surges=surges,
        ),
    ]
