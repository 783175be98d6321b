"""Training iterations under ZeRO-1, phase by phase: measured on real ranks, and played by the simulator."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.fx.experimental.proxy_tensor import make_fx
from torch.optim import Muon

import canzona_compile
from canzona_compile.analysis.roofline import Transfer, graph_time
from canzona_compile.ir.bucket import Bucket
from canzona_compile.machine.hardware import Hardware
from canzona_compile.simulation.model_passes import (
    BucketLoad,
    backward_pass,
    bucket_load,
    forward_pass,
)
from canzona_compile.simulation.simulate import simulate
from latency_cases import CASES, Case, Shape
from latency_results import spread
from latency_rounds import Sample, random_matrices
from validation_rounds import (
    SHORTEST,
    TRIES,
    Comparison,
    Round,
    agreed,
    await_calm,
    chosen_rounds,
    quiet,
    watched,
)

PREFIX = "zero1-"
ZERO1_CASES = {PREFIX + name: case for name, case in CASES.items()}
PHASES = ("backward", "step", "forward")
GATHERS = ("forward", "step")
TOKENS = 256  # of a rank in an iteration
BUCKETS = 5  # in which the parameters lie, more or less
WARM_UP = 3  # iterations
NOTHING = Transfer(0.0, 0.0, 0)


class LayerChain(nn.Module):
    """Matrices that tokens go through one after the other; what is too wide for the next one is cut, or filled."""

    def __init__(self, shapes: Sequence[Shape]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(n, m, bias=False) for m, n in shapes)
        for layer, values in zip(self.layers, random_matrices(shapes, seed=0), strict=True):
            layer.weight = nn.Parameter(values / values.shape[1] ** 0.5)

    def forward(self, x: Tensor) -> Tensor:
        layer: Any
        for layer in self.layers:
            x = layer(F.pad(x, (0, layer.in_features - x.shape[1])))  # a negative number cuts
        return x.square().mean()


class Prediction(NamedTuple):
    """Seconds of a phase until the last rank is done, and CPU seconds of the mean rank."""

    seconds: float
    cpu: float


class Iterations:
    """A model under zero1 on this rank.

    Args:
        case: its matrices.
        mesh: the data-parallel ranks.
        gather: when parameters are gathered.
    """

    def __init__(self, case: Case, mesh: DeviceMesh, gather: Any) -> None:
        self.name = f"gather={gather}"
        self.gather = gather
        self.model = LayerChain(case.shapes)
        self.optimizer: Any = Muon(self.model.parameters(), lr=1e-3)
        size = 4 * case.elements // BUCKETS
        canzona_compile.zero1(self.model, self.optimizer, mesh=mesh, bucket_bytes=size, gather=gather)
        random = torch.Generator().manual_seed(dist.get_rank())
        self.inputs = torch.randn(TOKENS, case.shapes[0][1], generator=random)
        self._loss = self.model(self.inputs)

    def take(self) -> dict[str, Sample]:
        """Time each phase of an iteration, which ends with the next forward pass. All ranks begin it together."""
        found = {}
        for phase in PHASES:
            dist.barrier()
            cpu, wall = time.process_time(), time.perf_counter()
            getattr(self, f"_{phase}")()
            wall = time.perf_counter() - wall
            dist.barrier()  # threads that move bytes work until the last rank has its own
            found[phase] = Sample(wall, time.process_time() - cpu)
        return found

    def _backward(self) -> None:
        self._loss.backward()

    def _step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _forward(self) -> None:
        self._loss = self.model(self.inputs)

    def predicted(self, case: Case, hardware: Hardware) -> dict[str, Prediction]:
        """What the simulator says of each phase."""
        buckets: Sequence[Bucket] = self.optimizer.canzona.zero1.buckets
        ranks = buckets[0].ranks
        names = [name for name, _ in self.model.named_parameters()]
        loads = loads_of(buckets, dict(zip(names, case.shapes, strict=True)), names[0], hardware)
        backward = backward_pass(loads, ranks, hardware)
        work = sum(own.backward + own.copied + own.reduced.moved + own.reduced.latency for own in loads)
        gathers = [replace(own, forward=0.0) for own in loads]
        gathering = sum(own.copied + own.gathered.moved + own.gathered.latency for own in loads)
        played = simulate(self.optimizer.canzona.reported(), hardware)
        step = Prediction(played.seconds, statistics.fmean(rank.compute for rank in played.ranks))
        computing = sum(own.forward for own in loads)
        if self.gather == "forward":
            forward = Prediction(forward_pass(loads, ranks, hardware, overlapped=True).seconds, computing + gathering)
        else:
            after = forward_pass(gathers, ranks, hardware, overlapped=False).seconds
            step = Prediction(step.seconds + after, step.cpu + gathering)
            alone = [replace(own, copied=0.0, gathered=NOTHING) for own in loads]
            forward = Prediction(forward_pass(alone, ranks, hardware, overlapped=False).seconds, computing)
        return {"backward": Prediction(backward.seconds, work), "step": step, "forward": forward}


def loads_of(
    buckets: Sequence[Bucket], shapes: Mapping[str, Shape], first: str, hardware: Hardware
) -> list[BucketLoad]:
    """What each bucket asks of a rank, by the rates of the products of its layers.

    Args:
        buckets: those of the model.
        shapes: of the matrices, by name.
        first: the matrix whose inputs need no gradient.
        hardware: the rates.
    """
    found = []
    for bucket in buckets:
        times = [layer_seconds(shapes[name], name == first, hardware) for name in bucket.names]
        found.append(bucket_load(bucket, sum(t[0] for t in times), sum(t[1] for t in times), hardware))
    return found


def layer_seconds(shape: Shape, first: bool, hardware: Hardware) -> tuple[float, float]:
    """Seconds of one layer's forward and backward, from the graphs of what it computes."""
    (m, n), backward = shape, weight_gradient if first else gradients
    sizes = (TOKENS, n), (m, n), (TOKENS, m)
    return (
        seconds_of(lambda x, weight: x @ weight.mT, sizes[:2], hardware),
        seconds_of(backward, sizes, hardware),
    )


def weight_gradient(x: Tensor, weight: Tensor, grad: Tensor) -> Tensor:
    return grad.mT @ x


def gradients(x: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    return grad.mT @ x, grad @ weight


def seconds_of(function: Callable[..., Any], sizes: Sequence[tuple[int, int]], hardware: Hardware) -> float:
    """Seconds of a function of matrices of some sizes."""
    with FakeTensorMode():
        graph = make_fx(function)(*(torch.empty(size) for size in sizes)).graph
    return graph_time(graph, hardware).total(hardware)


# -- a case ----------------------------------------------------------------------------------------


def compare_zero1(case: Case, mesh: DeviceMesh, hardware: Hardware, rounds: int, patience: float) -> list[Comparison]:
    """Measure a case with gathers in the forward pass and in the step, in turns, and predict it; a collective."""
    variants = [Iterations(case, mesh, gather) for gather in GATHERS]
    lasts = {}
    for variant in variants:
        for _ in range(WARM_UP):
            lasts[variant.name] = agreed(sum(own.wall for own in variant.take().values()))
    counts = {name: max(1, round(SHORTEST / seconds)) for name, seconds in lasts.items()}
    taken: dict[str, list[Round]] = defaultdict(list)
    for number in range(TRIES * rounds):
        waiting = [v for v in variants if quiet(taken[v.name + PHASES[0]]) < rounds]
        turn = number % max(1, len(waiting))  # another one goes first each time
        for variant in waiting[turn:] + waiting[:turn]:
            patience -= await_calm(patience)
            for phase, own in take(variant, counts[variant.name]).items():
                taken[variant.name + phase].append(own)
    return [
        own
        for variant in variants
        for own in comparisons(case, variant, {phase: taken[variant.name + phase] for phase in PHASES}, hardware)
    ]


def take(variant: Iterations, count: int) -> dict[str, Round]:
    """Time some iterations; a collective."""
    own: list[dict[str, Sample]] = []
    _, foreign = watched(lambda: own.extend(variant.take() for _ in range(count)))
    walls = torch.tensor([[one[phase].wall for phase in PHASES] for one in own], dtype=torch.float64)
    cpu = torch.tensor([[one[phase].cpu for phase in PHASES] for one in own], dtype=torch.float64).mean(0)
    dist.all_reduce(walls, dist.ReduceOp.MAX)
    dist.all_reduce(cpu)
    return {phase: Round(tuple(walls[:, i].tolist()), float(cpu[i]), foreign) for i, phase in enumerate(PHASES)}


def comparisons(
    case: Case, variant: Iterations, rounds: Mapping[str, Sequence[Round]], hardware: Hardware
) -> list[Comparison]:
    """One comparison for each phase."""
    found = []
    for phase, predicted in variant.predicted(case, hardware).items():
        chosen, ranks = chosen_rounds(rounds[phase]), dist.get_world_size()
        measured = spread([s * 1e3 for one in chosen for s in one.seconds])
        found.append(
            Comparison(
                case=PREFIX + case.name,
                ranks=ranks,
                variant=f"{variant.name}, {phase}",
                step_ms=measured,
                quiet=quiet(rounds[phase]),
                rounds=rounds[phase],
                predicted_ms=predicted.seconds * 1e3,
                compute_ms=predicted.cpu * 1e3,
                exposed_ms=0.0,
                bubble_ms=0.0,
                error=predicted.seconds * 1e3 / measured.median - 1,
                cpu_error=predicted.cpu * ranks / statistics.median(one.cpu for one in chosen) - 1,
            )
        )
    return found
