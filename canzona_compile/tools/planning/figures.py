"""The figures of a plan made offline that no run has, as plain data. `forecast` fills them in."""

from __future__ import annotations

from dataclasses import dataclass

from canzona_compile.machine.hardware import Hardware
from canzona_compile.report.schema import Figures
from canzona_compile.simulation.engine import Simulation, Span


@dataclass(frozen=True, slots=True)
class StrategyForecast:
    """How long a template's matrices would take by one strategy if their ranks did nothing else.

    Attributes:
        name: "owner" or "replicated".
        compute, gather, scatter: the parts of `seconds`, which do not overlap.
        chosen: whether the plan takes it for at least one of the matrices.
    """

    name: str
    seconds: float
    compute: float
    gather: float
    scatter: float
    chosen: bool
    note: str


@dataclass(frozen=True, slots=True)
class TemplateCost:
    """What one matrix of a template costs its owner.

    Attributes:
        memory_bytes: that the owner's graph reads and writes.
    """

    memory_bytes: int
    seconds: float
    strategies: tuple[StrategyForecast, ...]


@dataclass(frozen=True, slots=True)
class PhaseForecast:
    """One phase of an iteration under ZeRO-1.

    Attributes:
        name: "backward", "step" or "forward", the pass after the step.
        exposed: seconds of it that communication adds.
        sent: bytes that ranks send over the data-parallel axis, summed over all ranks.
        spans: what one rank does in a pass, if that is to be shown; those of the step are in its simulation.
    """

    name: str
    seconds: float
    exposed: float
    sent: int
    collectives: int
    spans: tuple[Span, ...] = ()


@dataclass(frozen=True, slots=True)
class Zero1Forecast:
    """The buckets of a plan for ZeRO-1, and an iteration with them.

    Attributes:
        padding_share: elements of all buckets on one rank that are padding, over those that are not.
        makespan: FLOPs of the busiest rank in a step.
    """

    padding_share: float
    makespan: int
    phases: tuple[PhaseForecast, ...]

    @property
    def sent(self) -> int:
        """Bytes of all phases on the data-parallel axis."""
        return sum(phase.sent for phase in self.phases)

    @property
    def exposed(self) -> float:
        """Seconds that communication adds to an iteration."""
        return sum(phase.exposed for phase in self.phases)


@dataclass(frozen=True, slots=True)
class PeriodForecast:
    """The predicted seconds of the steps of a period.

    Attributes:
        seconds: step by step. A common period that is longer than `stagger.LONGEST` is cut off there.
    """

    seconds: tuple[float, ...]
    mean: float
    worst: float


@dataclass(frozen=True, slots=True)
class Alternative:
    """The same model and mesh planned another way.

    Attributes:
        name: "lpt-swap", "alpha", ..., or "every rank computes everything".
        imbalance: FLOPs of the busiest rank over those of the mean.
        exposed: the seconds of it that the busiest rank waits for communication.
        sent: bytes that ranks send to other ranks.
        peak: most bytes of buffers on a rank.
        zero1: figures of its buckets; None if it has none.
    """

    name: str
    about: str
    imbalance: float
    seconds: float
    exposed: float
    sent: int
    peak: int
    groups: int
    chosen: bool = False
    zero1: Zero1Forecast | None = None


@dataclass(frozen=True, slots=True)
class MemoryForecast:
    """Bytes on the rank that needs most.

    Attributes:
        state: optimizer state on fragments and on owners, but for what is in host memory.
        state_host: optimizer state in host memory.
        state_replicated: if every rank kept the whole state of the matrices of its grid.
    """

    buffers: int
    one_group: int
    state: int
    state_replicated: int
    state_host: int = 0


@dataclass(frozen=True, slots=True)
class LocalForecast:
    """The parameters of a chain that each rank updates by itself, elementwise: for example those of AdamW.

    Attributes:
        most: elements on the rank that has most of them.
        state: bytes of optimizer state on the rank that has most, but for what is in host memory.
        state_host: bytes of optimizer state in host memory.
        seconds: of their update on the rank that takes longest, without launches; they are not in the simulated step.
    """

    optimizers: tuple[str, ...]
    parameters: int
    elements: int
    most: int
    state: int
    seconds: float
    state_host: int = 0


@dataclass(frozen=True, kw_only=True)
class Forecast(Figures):
    """A plan made offline.

    Attributes:
        fingerprint: that of the scheduled step; a run that makes the same plan has the same one.
        matrices, elements: how many are distributed. Each rank updates the `elementwise` parameters by itself.
        share: the elements of the matrices over those of all parameters.
        mesh: size of each dim, in order.
        zero1: the buckets and what happens before and after the step; None unless updates are "zero1".
        period: the seconds of the steps of a period; None if every step does the same. All other figures are those of
            the heaviest step.
        assumptions: what the predictions assume beside the rates, in words.
        local: the parameters that each rank updates by itself; None if the optimizer is no chain.
    """

    fingerprint: str
    model: str
    matrices: int
    elements: int
    elementwise: int
    share: float
    mesh: tuple[tuple[str, int], ...]
    hardware: Hardware
    options: tuple[tuple[str, str], ...]
    costs: tuple[TemplateCost, ...]
    memory: MemoryForecast
    simulation: Simulation
    alternatives: tuple[Alternative, ...]
    assumptions: tuple[str, ...]
    zero1: Zero1Forecast | None = None
    period: PeriodForecast | None = None
    local: LocalForecast | None = None
