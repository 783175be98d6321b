"""Predict how long a graph takes, alone on one rank, from the FLOPs and bytes of its nodes and a machine's rates.

There are two models of time. This is the first one, which computes seconds from FLOPs and bytes in closed form.
`analysis.step_time` adds them up to a step, as far as a decision needs. Every rank evaluates this model by itself and
has to come to the same decision, so it is cheap and depends on the step and the rates alone. The second model is
`simulation`: it plays every rank of a finished plan, and decides nothing.

A graph takes the sum of the seconds of its nodes. Arithmetic or memory bounds each node, whichever takes longer. Every
operator also costs a launch: on a CPU that is the way from Python to the kernel, which views take too, and a product
has its library choose code. Work that many tasks share in one call is launched once.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

import sympy
import torch
from torch import fx

from canzona_compile.analysis.flops import (
    addend,
    bytes_of_wires,
    decomposition,
    decomposition_flops,
    factors,
    flips,
    flops_of,
    node_flops,
    symbolic_dims,
    turned,
)
from canzona_compile.ir.bucket import Bucket
from canzona_compile.ir.compiled_call import opened
from canzona_compile.ir.fx_utils import casts, is_operator, outputs, tensor_value
from canzona_compile.ir.step import Placed, Template
from canzona_compile.kernels.ops import GEMM_AXPBY, SYM_GEMM
from canzona_compile.machine.hardware import Hardware, Link

TYPICAL = 4096  # dim of the products whose rate is used for all products if only FLOPs should count


def exchange_seconds(link: Link, busiest: float, members: int) -> float:
    """Seconds of an exchange among some ranks.

    Args:
        busiest: how many bytes the busiest rank sends or receives.
    """
    return busiest / link.bandwidth + link.latency + link.per_peer * (members - 1)


@dataclass(frozen=True, slots=True)
class Transfer:
    """One collective of a bucket on the busiest rank.

    Attributes:
        moved: seconds for which it keeps the links busy; the processor where that moves the bytes.
        latency: seconds until the first data arrives.
        sent: bytes.
    """

    moved: float
    latency: float
    sent: int


def once_around(bucket: Bucket, hardware: Hardware) -> Transfer:
    """A collective that sends each shard once to, or from, every other rank: along a ring, or one ring per shard.

    So the rank with the shortest shard sends most, and a uniform collective moves the padding too. An uneven one is
    made of one collective per shard, each of which costs the latency. This is cautious: they are started together.
    """
    if len(bucket.ranks) < 2:
        return Transfer(0.0, 0.0, 0)
    link = hardware.link(bucket.ranks)
    sent = (bucket.starts[-1] - min(bucket.shard_lengths)) * bucket.dtype.itemsize
    return Transfer(sent / link.bandwidth, link.latency * bucket.collectives, sent)


@dataclass(frozen=True, slots=True)
class NodeWork:
    """What one node does.

    Attributes:
        seconds: of arithmetic, at the machine's rate for this operator and size.
        bytes: that the node reads and writes in memory meanwhile.
        calls: operators that are launched; 0 for views on a GPU and for arithmetic on numbers.
        added: seconds of copying the addend of a product to where the result will be, a pass of its own.
        turned: further seconds of that copy in a stack, where a transposed addend is not copied tile by tile.
        product: dtype of a matrix product, whose call is not in `calls`; empty for others.
        size: of a matrix product, the geometric mean of its three dims.
        own: whether a product is one of our operators, which always run on stacks where tasks are alike.
        name: of a decomposition; empty for others.
    """

    seconds: float
    bytes: int
    calls: int
    added: float = 0.0
    turned: float = 0.0
    product: str = ""
    flops: float = 0.0
    size: float = 0.0
    own: bool = False
    name: str = ""

    def times(self, matrices: int) -> NodeWork:
        """The same for each matrix of a stack, in one call."""
        scaled = {name: matrices * getattr(self, name) for name in ("seconds", "bytes", "added", "turned", "flops")}
        return replace(self, **scaled)

    def lasts(self, hardware: Hardware) -> float:
        """The seconds that the node takes, without launches."""
        return max(self.seconds, self.bytes / hardware.bandwidth) + self.added

    def saves(self, count: int, hardware: Hardware) -> float:
        """The seconds by which a product of each of `count` matrices is shorter if they are multiplied as a stack.

        One product of small matrices leaves processors of a GPU idle, which those of the others fill. So a stack has
        the rate of one product with as many FLOPs, or the highest rate of smaller ones. On a CPU a stack is a loop.
        """
        if not self.own or hardware.device == "cpu":
            return 0.0
        rate = hardware.product_rate(self.product, self.size, self.size * count ** (1 / 3))
        seconds = min(self.seconds, self.flops / rate)
        return max(self.seconds, self.bytes / hardware.bandwidth) - max(seconds, self.bytes / hardware.bandwidth)


@dataclass(frozen=True, slots=True)
class GraphTime:
    """What a graph takes for one task: a whole matrix, or each of a stack.

    Attributes:
        calls: operators that are launched, matrix products aside.
        products: how many matrix products are called, by dtype.
        turned: further seconds where tasks are stacked, of passes over transposed matrices.
    """

    seconds: float
    calls: int
    products: tuple[tuple[str, int], ...] = ()
    turned: float = 0.0
    works: tuple[NodeWork, ...] = ()

    def saves(self, count: int, hardware: Hardware) -> float:
        """The seconds by which one matrix takes less in a stack of `count`."""
        return sum(work.saves(count, hardware) for work in self.works)

    def product_calls(self, hardware: Hardware) -> float:
        """Seconds of launching the matrix products."""
        return sum(count * hardware.product_call(dtype) for dtype, count in self.products)

    def launches(self, hardware: Hardware) -> float:
        """Seconds of all launches if every operator runs by itself."""
        return self.calls * hardware.launch + self.product_calls(hardware)

    def total(self, hardware: Hardware) -> float:
        """Seconds of one whole matrix by itself."""
        return self.seconds + self.launches(hardware)


def graph_time(graph: fx.Graph, hardware: Hardware, matrices: int = 1) -> GraphTime:
    """What a graph takes for a stack of so many matrices, its nodes one after the other and nothing fused."""
    done = [work.times(matrices) for work in works(graph, hardware)]
    products = Counter(work.product for work in done if work.product)
    return GraphTime(
        sum(work.lasts(hardware) for work in done),
        sum(work.calls for work in done),
        tuple(sorted(products.items())),
        sum(work.turned for work in done),
        tuple(work for work in done if work.product),
    )


def product_flops(graph: fx.Graph, template: Template) -> dict[str, int]:
    """FLOPs of a graph's matrix products, by dtype."""
    dims = symbolic_dims(graph, template)
    found: dict[str, sympy.Expr] = defaultdict(lambda: sympy.Integer(0))
    for node in dims:
        if factors(node):
            found[dtype_name(node.meta["val"])] += node_flops(node, dims)
    return {dtype: flops_of(flops, template.shape) for dtype, flops in found.items()}


def product_seconds(graph: fx.Graph, template: Template, hardware: Hardware) -> float:
    """Seconds of a graph's matrix products, all at the rate of one size, so that within a dtype FLOPs alone count."""
    flops = product_flops(graph, template)
    return sum(count / hardware.product_rate(dtype, TYPICAL) for dtype, count in flops.items())


def works(graph: fx.Graph, hardware: Hardware) -> Iterator[NodeWork]:
    """What the nodes of a graph do, in order, and the operators that compiled functions call."""
    for node in opened(graph):
        value = tensor_value(node)
        if node.op == "call_function" and decomposition(node):
            yield decomposition_work(node, hardware)
        elif node.op == "call_function" and value is not None:
            yield work_of(node, value, hardware)


def decomposition_work(node: fx.Node, hardware: Hardware) -> NodeWork:
    """The work of a decomposition."""
    name, operand = decomposition(node), tensor_value(node.all_input_nodes[0])
    assert operand is not None
    flops, size = float(decomposition_flops(node, operand.shape)), operand.shape[-1]
    moved = size_of(operand) + sum(map(size_of, results(node)))
    return NodeWork(flops / hardware.factorization_rate(name, size), moved, 1, name=name)


def results(node: fx.Node) -> list[torch.Tensor]:
    """The tensors that a node returns, one or several."""
    value = node.meta.get("val")
    return [v for v in (value if isinstance(value, tuple | list) else [value]) if isinstance(v, torch.Tensor)]


def work_of(node: fx.Node, value: torch.Tensor, hardware: Hardware) -> NodeWork:
    target = node.target
    if is_operator(target) and target.is_view:
        return NodeWork(0.0, 0, int(hardware.device == "cpu"))
    operands = {n: v for n in node.all_input_nodes if (v := tensor_value(n)) is not None}
    if pair := factors(node):
        return product_of(node, pair, value, hardware)
    moved = size_of(value) + sum(map(size_of, operands.values()))
    return NodeWork(0.0, moved, 1)


def product_of(node: fx.Node, pair: tuple[fx.Node, fx.Node], value: torch.Tensor, hardware: Hardware) -> NodeWork:
    left, right = (tensor_value(f) for f in pair)
    assert left is not None and right is not None
    first, second = (turned(tuple(v.shape), f) for v, f in zip((left, right), flips(node), strict=True))
    m, k, n = first[-2], first[-1], second[-1]
    more = addend(node)
    own = node.target in (SYM_GEMM, GEMM_AXPBY)  # they read what they add as they go; libraries copy it first
    dtype, added = dtype_name(value), 2 * size_of(value) if more is not None and not own else 0
    straight = added / hardware.bandwidth
    other = more is not None and added and transposed(more)
    flops, size = 2.0 * value.numel() * k, (m * k * n) ** (1 / 3)
    return NodeWork(
        flops / hardware.product_rate(dtype, size),
        size_of(left) + size_of(right) + size_of(value) + (size_of(value) if own and more is not None else 0),
        int(added > 0),
        straight,
        max(0.0, added / turning(value, hardware) - straight) if other else 0.0,
        dtype,
        flops,
        size,
        own,
    )


def transposed(node: fx.Node) -> bool:
    """Whether a matrix lies in memory column by column."""
    value = tensor_value(node)
    return value is not None and value.ndim >= 2 and value.stride(-1) != 1 and value.stride(-2) == 1


def turning(value: torch.Tensor, hardware: Hardware) -> float:
    """Bytes per second at which a matrix is written in the other order."""
    return hardware.transposed.at(math.sqrt(value.shape[-1] * value.shape[-2]))


def size_of(value: torch.Tensor) -> int:
    return value.numel() * value.dtype.itemsize


def dtype_name(value: torch.Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class PlacedTime:
    """What the three graphs of a cut take for one task.

    Attributes:
        gathered, scattered: bytes that cross to and from the owner.
        packed: bytes of `gathered` that a copy of its own packs. A cast at the end of prepare needs none: it writes
            where the message is.
        kept: bytes of new state that prepare has made and apply copies.
        turned: further seconds of packing what is scattered where it is transposed.
    """

    prepare: GraphTime
    compute: GraphTime
    apply: GraphTime
    gathered: int
    scattered: int
    packed: int
    kept: int
    turned: float


def placed_time(placed: Placed, hardware: Hardware) -> PlacedTime:
    """What the graphs of a cut take on some hardware, and the bytes that they exchange."""
    count, graphs = placed.kind.matrices, (placed.prepare, placed.compute, placed.apply)
    prepare, compute, apply = (graph_time(g, hardware, count) for g in graphs)
    sizes = [math.prod(w.shape) * w.itemsize for w in placed.gather]
    sent = outputs(placed.prepare)[: len(sizes)]
    packed = sum(size for size, node in zip(sizes, sent, strict=True) if not casts(node))
    made = (tensor_value(n) for n in outputs(placed.apply) if isinstance(n, fx.Node) and n.op == "placeholder")
    kept = count * sum(size_of(value) for value in made if value is not None)
    turned = 0.0
    for node in outputs(placed.compute)[: len(placed.scatter)]:
        if transposed(node):
            value = tensor_value(node)
            assert value is not None
            turned += 2 * count * size_of(value) * max(0.0, 1 / turning(value, hardware) - 1 / hardware.bandwidth)
    return PlacedTime(prepare, compute, apply, sum(sizes), bytes_of_wires(placed.scatter), packed, kept, turned)
