"""How long graphs and transfers take on a kind of machine: a sum over nodes, each bound by arithmetic or memory.

Beside its work every operator costs a launch. On a CPU that is the way from Python to the kernel, which views take
too; a product also has its library choose code. Work that many tasks share in one call is launched once.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from canzona_compile.analysis.flops import (
    BY_PRODUCTS,
    addend,
    decomposition,
    decomposition_flops,
    factors,
    flips,
    turned,
)
from canzona_compile.ir.fx_utils import outputs, tensor_value
from canzona_compile.ir.hardware import Hardware
from canzona_compile.ir.step import Placed
from canzona_compile.kernels.ops import GEMM_AXPBY, SYM_GEMM


@dataclass(frozen=True, slots=True)
class Work:
    """What one node does.

    Attributes:
        seconds: of arithmetic, at the machine's rate for this operator and size.
        bytes: read and written in memory while that goes on.
        calls: operators that are launched; 0 for views on a GPU and arithmetic on numbers.
        added: seconds of a pass of its own: the addend of a product is copied to where the result will be.
        turned: further seconds of that in a stack, where a transposed addend is not copied tile by tile.
        product: dtype of a matrix product, whose call is not in `calls`; empty for others.
    """

    seconds: float
    bytes: int
    calls: int
    added: float = 0.0
    turned: float = 0.0
    product: str = ""

    def lasts(self, hardware: Hardware) -> float:
        return max(self.seconds, self.bytes / hardware.bandwidth) + self.added


@dataclass(frozen=True, slots=True)
class GraphTime:
    """A graph for one whole matrix.

    Attributes:
        seconds: beside launches.
        calls: operators that are launched, without matrix products.
        products: calls of matrix products by dtype.
        turned: further seconds where tasks are stacked: passes over transposed matrices.
    """

    seconds: float
    calls: int
    products: tuple[tuple[str, int], ...] = ()
    turned: float = 0.0

    def product_calls(self, hardware: Hardware) -> float:
        return sum(count * hardware.product_call(dtype) for dtype, count in self.products)

    def launches(self, hardware: Hardware) -> float:
        """Seconds of launches when every operator runs by itself."""
        return self.calls * hardware.launch + self.product_calls(hardware)

    def total(self, hardware: Hardware) -> float:
        """Seconds of one whole matrix by itself."""
        return self.seconds + self.launches(hardware)


def graph_time(graph: fx.Graph, hardware: Hardware) -> GraphTime:
    """The time of a graph, node after node, nothing fused."""
    done = list(works(graph, hardware))
    products = Counter(work.product for work in done if work.product)
    return GraphTime(
        sum(work.lasts(hardware) for work in done),
        sum(work.calls for work in done),
        tuple(sorted(products.items())),
        sum(work.turned for work in done),
    )


def works(graph: fx.Graph, hardware: Hardware) -> Iterator[Work]:
    for node in graph.nodes:
        value = tensor_value(node)
        if node.op == "call_function" and decomposition(node):
            yield decomposition_work(node, hardware)
        elif node.op == "call_function" and value is not None:
            yield work_of(node, value, hardware)


def decomposition_work(node: fx.Node, hardware: Hardware) -> Work:
    """A decomposition, whatever it returns; ours by products at the rate of products until theirs was measured."""
    name, operand = decomposition(node), tensor_value(node.all_input_nodes[0])
    assert operand is not None
    flops, size = float(decomposition_flops(node, operand.shape)), operand.shape[-1]
    moved = size_of(operand) + sum(map(size_of, results(node)))
    if name in BY_PRODUCTS and name not in dict(hardware.factorizations):
        return Work(flops / hardware.product_rate("float32", size), moved, BY_PRODUCTS[name])
    return Work(flops / hardware.factorization_rate(name, size), moved, 1)


def results(node: fx.Node) -> list[torch.Tensor]:
    """The tensors that a node returns, one or several."""
    value = node.meta.get("val")
    return [v for v in (value if isinstance(value, tuple | list) else [value]) if isinstance(v, torch.Tensor)]


def work_of(node: fx.Node, value: torch.Tensor, hardware: Hardware) -> Work:
    target = node.target
    if isinstance(target, torch._ops.OpOverload) and target.is_view:
        return Work(0.0, 0, int(hardware.device == "cpu"))
    operands = {n: v for n in node.all_input_nodes if (v := tensor_value(n)) is not None}
    if pair := factors(node):
        return product_of(node, pair, value, hardware)
    moved = size_of(value) + sum(map(size_of, operands.values()))
    return Work(0.0, moved, 1)


def product_of(node: fx.Node, pair: tuple[fx.Node, fx.Node], value: torch.Tensor, hardware: Hardware) -> Work:
    left, right = (tensor_value(f) for f in pair)
    assert left is not None and right is not None
    first, second = (turned(tuple(v.shape), f) for v, f in zip((left, right), flips(node), strict=True))
    m, k, n = first[-2], first[-1], second[-1]
    more = addend(node)
    own = node.target in (SYM_GEMM, GEMM_AXPBY)  # they read what they add as they go; libraries copy it first
    dtype, added = dtype_name(value), 2 * size_of(value) if more is not None and not own else 0
    straight = added / hardware.bandwidth
    other = more is not None and added and transposed(more)
    return Work(
        2.0 * value.numel() * k / hardware.product_rate(dtype, (m * k * n) ** (1 / 3)),
        size_of(left) + size_of(right) + size_of(value) + (size_of(value) if own and more is not None else 0),
        int(added > 0),
        straight,
        max(0.0, added / turning(value, hardware) - straight) if other else 0.0,
        dtype,
    )


def transposed(node: fx.Node) -> bool:
    """Does a matrix lie column by column?"""
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
    """The three graphs of a cut, for one whole matrix.

    Attributes:
        gathered, scattered: bytes of what crosses.
        packed: bytes of what is copied to be sent by a copy of its own. A cast at the end of prepare is not: it
            writes where the message is.
        kept: bytes that apply copies, because prepare has made them: new state.
        turned: seconds that packing what is scattered takes longer because it is transposed.
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
    prepare, compute, apply = (graph_time(g, hardware) for g in (placed.prepare, placed.compute, placed.apply))
    sizes = [math.prod(w.shape) * w.itemsize for w in placed.gather]
    sent = outputs(placed.prepare)[: len(sizes)]
    packed = sum(size for size, node in zip(sizes, sent, strict=True) if not casts(node))
    down = sum(math.prod(w.shape) * w.itemsize for w in placed.scatter)
    made = (tensor_value(n) for n in outputs(placed.apply) if isinstance(n, fx.Node) and n.op == "placeholder")
    kept = sum(size_of(value) for value in made if value is not None)
    turned = 0.0
    for node in outputs(placed.compute)[: len(placed.scatter)]:
        if transposed(node):
            value = tensor_value(node)
            assert value is not None
            turned += 2 * size_of(value) * max(0.0, 1 / turning(value, hardware) - 1 / hardware.bandwidth)
    return PlacedTime(prepare, compute, apply, sum(sizes), down, packed, kept, turned)


def casts(node: object) -> bool:
    """Is it a cast to another dtype and nothing else?"""
    cast = torch.ops.aten._to_copy.default
    return isinstance(node, fx.Node) and node.target is cast and set(node.kwargs) == {"dtype"}
