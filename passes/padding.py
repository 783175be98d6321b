"""Pad 16-bit matrices of odd sizes with zeros once, so that the rows of all their products are aligned."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import fx

from canzona_compile.analysis.flops import addend, factors
from canzona_compile.analysis.linear_algebra import flipped, shifted, source, swaps, terms
from canzona_compile.ir.fx_utils import drop_dead_code, insert_call, tensor_value
from canzona_compile.ir.step import Form, Placed, Step
from canzona_compile.kernels.ops import GEMM_AXPBY, PAD_CAST, SYM_GEMM
from canzona_compile.kernels.padding import padded_size

aten = torch.ops.aten

# The factors of a product and of its addend: the keyword, and the number if it is not given.
PRODUCTS: Mapping[Any, tuple[tuple[str, float], tuple[str, float]]] = {
    aten.mm.default: (("alpha", 1.0), ("beta", 0.0)),
    aten.addmm.default: (("alpha", 1.0), ("beta", 1.0)),
    SYM_GEMM: (("alpha", 1.0), ("beta", 0.0)),
    GEMM_AXPBY: (("beta", 1.0), ("alpha", 1.0)),
}


@dataclass(frozen=True, slots=True)
class Padding:
    """On CUDA, pad the 16-bit matrices that products read to multiples of 16, and crop the results.

    Kernels copy rows asynchronously only if these begin at multiples of 16 bytes. Padding happens together with the
    cast to 16 bits. Products, sums and transposes of padded matrices are padded matrices: they have zeros beside the
    matrix, and a multiple of the identity in the corner if multiples of the identity were added. The pass follows that
    multiple as a number. Where it is not known or could overflow, the pass does not pad. Matrices with a size that
    would grow by more than a sixteenth stay as they are, and their products too.
    """

    name: ClassVar[str] = "padding"
    requires: ClassVar[Form] = Form.ROUTED
    ensures: ClassVar[Form] = Form.ROUTED

    def __call__(self, step: Step) -> Step:
        if step.machine.device != "cuda":
            return step
        return replace(step, placed=tuple(map(padded_cut, step.placed)))


def padded_cut(cut: Placed) -> Placed:
    """A cut with a padded compute graph; the optimizer's own eager step stays as it is."""
    return cut if cut.template.interpreted else replace(cut, compute=padded(cut.compute))


def padded(graph: fx.Graph) -> fx.Graph:
    """A graph whose 16-bit products have aligned rows where that is possible; the graph itself if none gains."""
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
    """Whether the pass would pad a matrix."""
    value = tensor_value(node)
    return value is not None and any(wanted(size) != size for size in value.shape)


def even(value: torch.Tensor) -> bool:
    """Whether a value is a 16-bit matrix that has aligned rows once it is padded."""
    return value.ndim == 2 and value.dtype.itemsize == 2 and all(wanted(size) % 16 == 0 for size in value.shape)


def padded_values(graph: fx.Graph) -> dict[fx.Node, float]:
    """Find the products, and the values between them, that can be computed padded.

    Returns:
        For each of them, in order, the multiple of I in its corner.
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
    for node in reversed(list(found)):  # values that no product reads stay as they were
        if node.target not in PRODUCTS and not any(reader in found for reader in readers(node)):
            del found[node]
    return found


def readers(node: fx.Node) -> list[fx.Node]:
    """The nodes that read a matrix, directly or by putting its shifted diagonal back."""
    shifts = [s for d in node.users for a in d.users for s in a.users if (t := shifted(s)) and t.node is node]
    return [*node.users, *shifts]


def corner_of(node: fx.Node, known: Mapping[fx.Node, float]) -> float | None:
    """The multiple of I in the corner of a node's padded value, given those of its operands; None if not known."""
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
    if node.target in (aten.mul.Tensor, aten.div.Tensor) and not corner:  # zeros times or by one number on the device
        other = node.args[1]
        value = tensor_value(other) if isinstance(other, fx.Node) else None
        return 0.0 if value is not None and value.ndim == 0 else None
    return None


def corner_of_product(node: fx.Node, known: Mapping[fx.Node, float]) -> float | None:
    """The multiple of I in the corner of a product's padded value; None if not known or an operand has no padding."""
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
    """factor * corner + shift; None if a number that matters is not known."""
    if not isinstance(shift, int | float):
        return None
    if corner == 0.0:
        return float(shift)
    return factor * corner + shift if isinstance(factor, int | float) else None


class Padder:
    """Pads the products of a graph, in place."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph, self.inside = graph, padded_values(graph)
        self.made: dict[fx.Node, fx.Node] = {}

    def run(self) -> None:
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
        """Insert the same operator on padded operands."""
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
        """The padded matrix for a node. If there is none yet, insert the padding, together with the node's cast."""
        if node in self.made:
            return self.made[node]
        if not odd(node):
            return node
        inside = source(node)
        if swaps(node) and inside is not None:
            return flipped(self.graph, self.operand(inside))
        only = node.target is aten._to_copy.default and set(node.kwargs) == {"dtype"}
        cast = only and all(user in self.inside for user in node.users)
        args, kwargs = (node.args[0] if cast else node,), {"dtype": node.meta["val"].dtype}
        self.made[node] = insert_call(self.graph, PAD_CAST, args, kwargs, name="pad_cast_default")
        return self.made[node]

    def cropped(self, node: fx.Node, value: torch.Tensor) -> fx.Node:
        """Cut the padding off: the part of `node` that has the shape of `value`.

        Dims count from the end, so that the calls mean the same for a stack.
        """
        for dim in (1, 0):
            if node.meta["val"].shape[dim] != value.shape[dim]:
                with self.graph.inserting_after(node):
                    args = (node, dim - 2, 0, value.shape[dim])
                    node = insert_call(self.graph, aten.slice.Tensor, args, name="slice_tensor")
        return node
