"""How long graphs and transfers take on a kind of machine: a sum over nodes, each bound by arithmetic or memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from canzona_compile.cost import DECOMPOSITIONS, decomposition, factors
from canzona_compile.hardware import Hardware
from canzona_compile.ir import Placed, tensor_value


@dataclass(frozen=True, slots=True)
class Work:
    """What one node does.

    Attributes:
        seconds: of arithmetic, at the machine's rate for this operator and size.
        bytes: read and written in memory.
        calls: 1 where something is launched, 0 for views and arithmetic on numbers.
    """

    seconds: float
    bytes: int
    calls: int

    def lasts(self, hardware: Hardware) -> float:
        return max(self.seconds, self.bytes / hardware.bandwidth)


@dataclass(frozen=True, slots=True)
class GraphTime:
    """A graph for one whole matrix: seconds beside launches, and launches."""

    seconds: float
    calls: int

    def total(self, hardware: Hardware) -> float:
        return self.seconds + self.calls * hardware.launch


def graph_time(graph: fx.Graph, hardware: Hardware) -> GraphTime:
    """The time of a graph, node after node, nothing fused."""
    done = list(works(graph, hardware))
    return GraphTime(sum(work.lasts(hardware) for work in done), sum(work.calls for work in done))


def works(graph: fx.Graph, hardware: Hardware) -> Iterator[Work]:
    for node in graph.nodes:
        value = tensor_value(node)
        if node.op == "call_function" and value is not None:
            yield work_of(node, value, hardware)


def work_of(node: fx.Node, value: torch.Tensor, hardware: Hardware) -> Work:
    target = node.target
    if isinstance(target, torch._ops.OpOverload) and target.is_view:
        return Work(0.0, 0, 0)
    operands = {n: v for n in node.all_input_nodes if (v := tensor_value(n)) is not None}
    moved = size_of(value) + sum(map(size_of, operands.values()))
    if pair := factors(node):
        left, right = (tensor_value(f) for f in pair)
        assert left is not None and right is not None
        m, k, n = left.shape[-2], left.shape[-1], right.shape[-1]
        flops = 2.0 * value.numel() * k
        return Work(flops / hardware.product_rate(dtype_name(value), (m * k * n) ** (1 / 3)), moved, 1)
    if name := decomposition(node):
        first = next(iter(operands.values()))
        flops = float(DECOMPOSITIONS[name]) * first.numel() * first.shape[-1]
        return Work(flops / hardware.factorization_rate(name, first.shape[-1]), moved, 1)
    return Work(0.0, moved, 1)


def size_of(value: torch.Tensor) -> int:
    return value.numel() * value.dtype.itemsize


def dtype_name(value: torch.Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class PlacedTime:
    """The three graphs of a cut, for one whole matrix, and bytes of what crosses."""

    prepare: GraphTime
    compute: GraphTime
    apply: GraphTime
    gathered: int
    scattered: int


def placed_time(placed: Placed, hardware: Hardware) -> PlacedTime:
    graphs = (graph_time(g, hardware) for g in (placed.prepare, placed.compute, placed.apply))
    up = sum(math.prod(w.shape) * w.itemsize for w in placed.gather)
    down = sum(math.prod(w.shape) * w.itemsize for w in placed.scatter)
    return PlacedTime(*graphs, up, down)
