"""Pad 16-bit matrices of odd sizes with zeros, so that the rows of all their products are aligned."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import fx

from canzona_compile.analysis.flops import addend, factors
from canzona_compile.analysis.linear_algebra import flipped, shifted, source, swaps, terms
from canzona_compile.ir.fx_utils import casts, drop_dead_code, insert_call, tensor_value
from canzona_compile.ir.step import Form, Placed, Step
from canzona_compile.kernels.ops import GEMM_AXPBY, PAD_CAST, SYM_GEMM
from canzona_compile.kernels.padding import padded_size

aten = torch.ops.aten

# For the factor of a product and for that of its addend: the keyword of the operator, and its default.
PRODUCTS: Mapping[Any, tuple[tuple[str, float], tuple[str, float]]] = {
    aten.mm.default: (("alpha", 1.0), ("beta", 0.0)),
    aten.addmm.default: (("alpha", 1.0), ("beta", 1.0)),
    SYM_GEMM: (("alpha", 1.0), ("beta", 0.0)),
    GEMM_AXPBY: (("beta", 1.0), ("alpha", 1.0)),
}


@dataclass(frozen=True, slots=True)
class Padding:
    """On CUDA, pad the 16-bit matrices that products read to multiples of 16, and crop the results.

    Kernels copy rows asynchronously only if the rows begin at multiples of 16 bytes. The cast to 16 bits pads at the
    same time. Products, sums and transposes of padded matrices are padded matrices again: they have zeros beside the
    matrix. If a multiple of the identity was added, a multiple of it also stands in the corner of the padding. The pass
    follows that multiple as a number, and it does not pad where the number is unknown or may overflow. If a size would
    grow by more than a sixteenth, the matrix and its products stay as they are.
    """

    name: ClassVar[str] = "padding"
    requires: ClassVar[Form] = Form.ROUTED
    ensures: ClassVar[Form] = Form.ROUTED

    def __call__(self, step: Step) -> Step:
        if step.machine.device != "cuda":
            return step
        return replace(step, placed=tuple(map(padded_cut, step.placed)))


def padded_cut(cut: Placed) -> Placed:
    """Pad the compute graph of a cut. The optimizer's own eager step does not change."""
    return cut if cut.template.interpreted else replace(cut, compute=padded(cut.compute))


def padded(graph: fx.Graph) -> fx.Graph:
    """Pad the 16-bit products of a graph where that is possible."""
    if not any(odd(node) for node in padded_values(graph)):
        return graph
    graph = copy.deepcopy(graph)
    Padder(graph).run()
    graph.lint()
    return graph


def wanted(size: int) -> int:
    """The size to which a dim of `size` is padded, in elements."""
    more = padded_size(size)
    return more if 16 * (more - size) <= size else size


def odd(node: fx.Node) -> bool:
    """Whether padding would change the shape of a matrix."""
    value = tensor_value(node)
    return value is not None and any(wanted(size) != size for size in value.shape)


def even(value: torch.Tensor) -> bool:
    """Whether a value is a 16-bit matrix [m, n] whose rows are aligned after padding."""
    return value.ndim == 2 and value.dtype.itemsize == 2 and all(wanted(size) % 16 == 0 for size in value.shape)


def padded_values(graph: fx.Graph) -> dict[fx.Node, float]:
    """Find the products that can be computed padded, and the values between them.

    Returns:
        For each of these nodes, in the order of the graph, the multiple of I in the corner of its padding.
    """
    found: dict[fx.Node, float] = {}
    for node in graph.nodes:
        value = tensor_value(node) if node.op == "call_function" else None
        if value is None or not even(value):
            continue
        if node.target in PRODUCTS or any(n in found for n in node.all_input_nodes):
            corner = corner_of(node, found)
            if corner is not None and abs(corner) < torch.finfo(value.dtype).max / 4:
                found[node] = corner
    for node in reversed(list(found)):  # a value that no product reads in the end is not worth padding
        if node.target not in PRODUCTS and not any(reader in found for reader in readers(node)):
            del found[node]
    return found


def readers(node: fx.Node) -> list[fx.Node]:
    """The nodes that read a matrix; also the one that puts its shifted diagonal back, if there is one."""
    shifts = [s for d in node.users for a in d.users for s in a.users if (t := shifted(s)) and t.node is node]
    return [*node.users, *shifts]


def corner_of(node: fx.Node, known: Mapping[fx.Node, float]) -> float | None:
    """The multiple of I in the corner of a node's padding, from those of its operands; None if it is not known."""
    if node.target in PRODUCTS:
        return corner_of_product(node, known)
    if shift := shifted(node):
        return multiple(1.0, known.get(shift.node, 0.0), shift.factor)
    if own := terms(node):
        parts = [multiple(term.factor, known.get(term.node, 0.0)) for term in own]
        return None if None in parts else sum(p for p in parts if p is not None)
    inside = source(node)
    if inside is None:
        return None
    corner = known.get(inside, 0.0)
    if swaps(node) or node.target in (aten._to_copy.default, aten.clone.default):
        return corner
    if node.target in (aten.mul.Tensor, aten.div.Tensor) and not corner:  # a finite 0-d tensor keeps zeros
        other = node.args[1]
        value = tensor_value(other) if isinstance(other, fx.Node) else None
        return 0.0 if value is not None and value.ndim == 0 else None
    return None


def corner_of_product(node: fx.Node, known: Mapping[fx.Node, float]) -> float | None:
    """The multiple of I in the corner of a product's padding; None if it is not known or an operand is not `even`."""
    pair, added = factors(node), addend(node)
    assert pair is not None
    operands = [*pair, *([added] if added is not None else [])]
    if any((v := tensor_value(n)) is None or not even(v) for n in operands):
        return None
    left, right = (known.get(n, 0.0) for n in pair)
    alpha, beta = (node.kwargs.get(name, default) for name, default in PRODUCTS[node.target])
    product = multiple(alpha, left * right, node.kwargs.get("diag", 0.0))
    rest = 0.0 if added is None else multiple(beta, known.get(added, 0.0))
    return None if product is None or rest is None else product + rest


def multiple(factor: Any, corner: float, shift: Any = 0.0) -> float | None:
    """The number factor * corner + shift; None if a number that matters is not a constant."""
    if not isinstance(shift, int | float):
        return None
    if corner == 0.0:
        return float(shift)
    return factor * corner + shift if isinstance(factor, int | float) else None


class Padder:
    """Pads the products of one graph, in place."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph, self.inside = graph, padded_values(graph)
        self.made: dict[fx.Node, fx.Node] = {}

    def run(self) -> None:
        """Insert padded operators, and crop their results for all other nodes that read them."""
        for node in self.inside:
            with self.graph.inserting_before(node):
                self.made[node] = self.rewritten(node)
        for node in self.inside:
            outside = [user for user in node.users if user not in self.inside and user not in self.made.values()]
            if outside and odd(node):
                with self.graph.inserting_after(self.made[node]):
                    kept = self.cropped(self.made[node], node.meta["val"])
            else:
                kept = self.made[node]
            for user in outside:
                user.replace_input_with(node, kept)
        drop_dead_code(self.graph)

    def rewritten(self, node: fx.Node) -> fx.Node:
        """Insert the operator of a node again, on padded operands."""
        if shift := shifted(node):
            spread: Any = node.args[1]
            diagonal = self.put(spread.args[0], {shift.node: self.operand(shift.node)})
            moved = self.put(spread, {spread.args[0]: diagonal})
            return self.put(node, {shift.node: self.operand(shift.node), spread: moved})
        return self.put(node, {n: self.operand(n) for n in node.all_input_nodes})

    def put(self, node: fx.Node, operands: Mapping[fx.Node, fx.Node]) -> fx.Node:
        """Insert the call of a node with other operands."""
        assert callable(node.target)
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: operands.get(n, n))
        return insert_call(self.graph, node.target, args, kwargs, name=node.name)

    def operand(self, node: fx.Node) -> fx.Node:
        """The padded matrix for a node. If there is none yet, insert the padding, which replaces a cast of the node."""
        if node in self.made:
            return self.made[node]
        if not odd(node):
            return node
        inside = source(node)
        if swaps(node) and inside is not None:
            return flipped(self.graph, self.operand(inside))
        cast = casts(node) and all(user in self.inside for user in node.users)
        args, kwargs = (node.args[0] if cast else node,), {"dtype": node.meta["val"].dtype}
        self.made[node] = insert_call(self.graph, PAD_CAST, args, kwargs, name="pad_cast_default")
        return self.made[node]

    def cropped(self, node: fx.Node, value: torch.Tensor) -> fx.Node:
        """Insert the part of `node` that has the shape of `value`.

        Dims count from the end, so that the calls mean the same for a stack.
        """
        for dim in (1, 0):
            if node.meta["val"].shape[dim] != value.shape[dim]:
                with self.graph.inserting_after(node):
                    args = (node, dim - 2, 0, value.shape[dim])
                    node = insert_call(self.graph, aten.slice.Tensor, args, name="slice_tensor")
        return node
