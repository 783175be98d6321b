"""Measures one case: all variants step by step beside one another, in the same processes."""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Parameter
from torch.optim import Muon

import canzona_compile
from canzona_compile.ir.options import StrategyOption
from canzona_compile.tools.traffic import Traffic, TrafficCounter
from latency_cases import Case, Shape
from latency_first_step import FirstStep, run_first_step
from latency_results import (
    CaseResult,
    Decision,
    ModelResult,
    Spread,
    VariantResult,
    spread,
)
from latency_variants import LOCAL, OURS, STOCK, Variant, make_variants, same_bits, shard

GRADIENT_SETS = 2  # steps alternate between them
STOCK_SECONDS = 6.0  # that the stock variant may spend in timed rounds of a case, or one round


@dataclass(frozen=True, slots=True)
class Sample:
    """Seconds of one step: the slowest rank's wall time and the busiest rank's CPU time."""

    wall: float
    cpu: float


class Samples:
    """Steps of several variants by round, on this rank until `shared` makes them those of all."""

    def __init__(self) -> None:
        self._own: dict[str, dict[int, Sample]] = defaultdict(dict)

    def take(self, variant: Variant, number: int) -> None:
        """Time one step that all ranks begin together."""
        dist.barrier()
        cpu, wall = time.process_time(), time.perf_counter()
        variant.step()
        self._own[variant.name][number] = Sample(time.perf_counter() - wall, time.process_time() - cpu)

    def shared(self, name: str) -> dict[int, Sample]:
        """A variant's steps by round, the maximum over ranks of each number; a collective."""
        own = self._own[name]
        values = torch.tensor([(s.wall, s.cpu) for s in own.values()], dtype=torch.float64)
        dist.all_reduce(values, dist.ReduceOp.MAX)
        return {n: Sample(*pair) for n, pair in zip(own, values.tolist(), strict=True)}


def random_matrices(shapes: Sequence[Shape], seed: int) -> list[Tensor]:
    """Equal on all ranks."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


class Gradients:
    """Equal gradients for all variants, made once, whole and sharded."""

    def __init__(self, shapes: Sequence[Shape], mesh: DeviceMesh) -> None:
        self.full = [random_matrices(shapes, seed) for seed in range(1, 1 + GRADIENT_SETS)]
        self.sharded = [shard(own, mesh) for own in self.full]

    def give(self, variant: Variant, number: int) -> None:
        chosen = number % GRADIENT_SETS
        variant.set_gradients(self.full[chosen], self.sharded[chosen])


def measure_case(case: Case, mesh: DeviceMesh, strategy: StrategyOption, optimizer: str, rounds: int) -> CaseResult:
    """First step, one step with the traffic counter on, then `rounds` timed rounds."""
    full = random_matrices(case.shapes, seed=0)
    variants = make_variants(full, mesh, strategy, optimizer)
    gradients = Gradients(case.shapes, mesh)
    first, traffic = begin(variants, gradients, rounds)
    running = [v for v in variants if not v.failure]
    samples = Samples()
    for number in range(rounds):
        turn = number % len(running)  # another one goes first each time
        for variant in running[turn:] + running[:turn]:
            if number % variant.every == 0:
                gradients.give(variant, number)
                samples.take(variant, number)
    shared = {v.name: samples.shared(v.name) for v in running}
    local = next(v for v in variants if v.name == LOCAL)
    results = {
        v.name: summary(v, shared[v.name], traffic[v.name], case, same_bits_or_none(v, local))
        if not v.failure
        else VariantResult(v.about, failure=v.failure)
        for v in variants
    }
    ours = shared[OURS]
    ratios = {name: spread([own[n].wall / ours[n].wall for n in own]) for name, own in shared.items() if name != OURS}
    decision = decision_of(next(v for v in variants if v.name == OURS).optimizer)
    matrices, elements = len(case.shapes), case.elements
    return CaseResult(case.name, case.about, matrices, elements, results, ratios, first, decision)


def begin(variants: Sequence[Variant], gradients: Gradients, rounds: int) -> tuple[FirstStep, dict[str, Traffic]]:
    """First steps, and one step with the traffic counter on.

    Finds out whether stock Muon runs and how often; its collectives are counted in its first step,
    because it may take many seconds per step and does the same in each.
    """
    first: FirstStep | None = None
    traffic: dict[str, Traffic] = {}
    for variant in variants:
        gradients.give(variant, 0)
        dist.barrier()
        if variant.name == STOCK:
            with TrafficCounter() as counter:
                seconds = try_step(variant)
            variant.every = min(rounds, math.ceil(rounds * agreed(seconds) / STOCK_SECONDS))
        else:
            if variant.name == OURS:
                first = slowest(run_first_step(variant.optimizer))
            else:
                variant.step()
            gradients.give(variant, 1)
            with TrafficCounter() as counter:
                variant.step()
        traffic[variant.name] = counter.total()
    assert first is not None
    return first, traffic


def try_step(variant: Variant) -> float:
    """Seconds of a step that may fail: on an unsupported layout it does so on every rank alike."""
    start = time.perf_counter()
    try:
        variant.step()
    except (RuntimeError, NotImplementedError, ValueError) as error:
        text = str(error).strip() or type(error).__name__
        variant.failure = f"{type(error).__name__}: {text.splitlines()[0]}"
    return time.perf_counter() - start


def agreed(seconds: float) -> float:
    """The longest of all ranks; a collective."""
    value = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return float(value)


def same_bits_or_none(variant: Variant, local: Variant) -> bool | None:
    """Stock Muon takes fewer steps, and splits sums by rank."""
    return None if variant.name == STOCK else same_bits(variant, local)


def summary(
    variant: Variant,
    samples: dict[int, Sample],
    traffic: Traffic,
    case: Case,
    equal: bool | None,
) -> VariantResult:
    return VariantResult(
        about=variant.about,
        step_ms=spread([s.wall * 1e3 for s in samples.values()]),
        cpu_us_per_matrix=spread([s.cpu * 1e6 / len(case.shapes) for s in samples.values()]),
        collectives=traffic.collectives,
        bytes_sent=traffic.bytes_sent,
        bytes_per_element=traffic.bytes_sent / case.elements,
        same_bits=equal,
    )


def slowest(own: FirstStep) -> FirstStep:
    """The first step of the rank on which it took longest; a collective."""
    everybody: list[FirstStep | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, own)
    return max((f for f in everybody if f is not None), key=lambda f: f.total)


def decision_of(optimizer: Any) -> Decision:
    report = optimizer.canzona.report()
    return Decision(
        strategies=dict(Counter(task.strategy for task in report.tasks)),
        micro_groups=len(report.micro_groups),
        imbalance=report.imbalance,
    )


def measure_model(case: Case, mesh: DeviceMesh, strategy: StrategyOption, rounds: int) -> ModelResult:
    """Ours alone: the first step's stages and what a steady step costs per matrix."""
    params = [Parameter(t) for t in shard(random_matrices(case.shapes, seed=0), mesh)]
    optimizer = canzona_compile.wrap(Muon(params), strategy=strategy)
    variant = Variant(OURS, case.about, params, optimizer)
    gradients = Gradients(case.shapes, mesh)
    gradients.give(variant, 0)
    dist.barrier()
    first = slowest(run_first_step(optimizer))
    gradients.give(variant, 1)
    variant.step()
    samples = Samples()
    for number in range(rounds):
        gradients.give(variant, number)
        samples.take(variant, number)
    steps = samples.shared(OURS).values()
    matrices = len(case.shapes)

    def per_matrix(seconds: list[float]) -> Spread:
        return spread([s * 1e6 / matrices for s in seconds])

    return ModelResult(
        name=case.name,
        about=case.about,
        matrices=matrices,
        elements=case.elements,
        first_step=first,
        decision=decision_of(optimizer),
        step_us_per_matrix=per_matrix([s.wall for s in steps]),
        cpu_us_per_matrix=per_matrix([s.cpu for s in steps]),
    )
