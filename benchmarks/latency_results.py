"""What is measured, as plain data; `asdict` of it is the JSON."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from latency_first_step import FirstStep

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and the 10th and 90th percentile."""

    median: float
    p10: float
    p90: float
    count: int


def spread(values: Sequence[float]) -> Spread:
    if len(values) < 2:
        (only,) = values
        return Spread(only, only, only, 1)
    tenths = statistics.quantiles(values, n=10, method="inclusive")
    return Spread(statistics.median(values), tenths[0], tenths[-1], len(values))


@dataclass(frozen=True, slots=True)
class VariantResult:
    """One variant in one case.

    Attributes:
        step_ms: wall time of a steady step, the slowest rank's.
        cpu_us_per_matrix: CPU time of a steady step's process by the matrices of the case, the
            busiest rank's. On CPU tensors that includes the kernels.
        collectives: per rank and step.
        bytes_sent: per step, that leave a rank, summed over ranks.
        same_bits: whether its parameters ended equal to those of the local variant, bit for bit;
            None for the stock variant, which takes part in fewer rounds.
        failure: why there is nothing else.
    """

    about: str
    step_ms: Spread | None = None
    cpu_us_per_matrix: Spread | None = None
    collectives: int = 0
    bytes_sent: int = 0
    bytes_per_element: float = 0.0
    same_bits: bool | None = None
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Decision:
    """What our plan chose for a case, from its own report."""

    strategies: Mapping[str, int]
    micro_groups: int
    imbalance: float


@dataclass(frozen=True, slots=True)
class CaseResult:
    """One case.

    Attributes:
        ratios: name of another variant -> its step time by ours, paired round by round.
    """

    name: str
    about: str
    matrices: int
    elements: int
    variants: Mapping[str, VariantResult]
    ratios: Mapping[str, Spread]
    first_step: FirstStep
    decision: Decision


@dataclass(frozen=True, slots=True)
class ModelResult:
    """`--first-step`: one model, ours alone.

    Attributes:
        step_us_per_matrix: wall time of a steady step by the number of matrices.
        cpu_us_per_matrix: CPU time of a steady step by the number of matrices.
    """

    name: str
    about: str
    matrices: int
    elements: int
    first_step: FirstStep
    decision: Decision
    step_us_per_matrix: Spread
    cpu_us_per_matrix: Spread


@dataclass(frozen=True, slots=True)
class Results:
    """A whole run."""

    schema: int
    torch: str
    ranks: int
    cores: int
    processor: str
    strategy: str
    optimizer: str
    rounds: int
    cases: Sequence[CaseResult] = ()
    models: Sequence[ModelResult] = ()
