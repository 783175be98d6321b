"""Read graphs as matrix algebra: transposes, products, and sums whose terms have numbers as factors.

ATen has many spellings for the same algebra. The functions here give one answer for all of them. Matrices are the last
two dims of floating-point tensors [..., m, n]; the dims before them are batch dims.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import fx

from canzona_compile.analysis.flops import LIBRARY_PRODUCTS, addend, factors
from canzona_compile.ir.fx_utils import insert_call, tensor_value

aten = torch.ops.aten

Factor: TypeAlias = "float | fx.Node | Arithmetic"  # a number: a constant, a node that holds one, or arithmetic

COPIES = frozenset(
    {
        aten.view.default,
        aten._unsafe_view.default,
        aten.reshape.default,
        aten.expand.default,
        aten.clone.default,
        aten.detach.default,
        aten.alias.default,
    }
)


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """A number that the graph does not compute yet."""

    op: str
    left: Factor
    right: Factor


def plus(a: Factor, b: Factor) -> Factor:
    """The number a + b, without arithmetic where that is possible."""
    if isinstance(a, float) and isinstance(b, float):
        return a + b
    return b if a == 0.0 else a if b == 0.0 else Arithmetic("add", a, b)


def minus(a: Factor, b: Factor) -> Factor:
    """The number a - b, without arithmetic where that is possible."""
    if isinstance(a, float) and isinstance(b, float):
        return a - b
    return a if b == 0.0 else Arithmetic("sub", a, b)


def times(a: Factor, b: Factor) -> Factor:
    """The number a * b, without arithmetic where that is possible."""
    if isinstance(a, float) and isinstance(b, float):
        return a * b
    if a == 0.0 or b == 0.0:
        return 0.0
    return b if a == 1.0 else a if b == 1.0 else Arithmetic("mul", a, b)


def written(factor: Factor, graph: fx.Graph) -> float | fx.Node:
    """Make a number an operand."""
    if not isinstance(factor, Arithmetic):
        return factor
    left, right = written(factor.left, graph), written(factor.right, graph)
    return insert_call(graph, getattr(operator, factor.op), (left, right))


def number(value: Any) -> Factor | None:
    """Read an operand as a number.

    Returns:
        The constant or the node; None for everything else, which includes booleans and 0-d tensors.
    """
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value)
    if not isinstance(value, fx.Node):
        return None
    known = value.meta.get("val", 0.0 if value.op == "placeholder" else None)  # hyperparameters have no record
    return value if isinstance(known, int | float | torch.SymInt | torch.SymFloat) else None


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """The shape of a node's tensor; () if its value is no tensor."""
    value = tensor_value(node)
    return () if value is None else tuple(value.shape)


def source(node: fx.Node) -> fx.Node | None:
    """The first operand of a node, if it is a node with a tensor; else None."""
    first = node.args[0] if node.args else None
    return first if isinstance(first, fx.Node) and tensor_value(first) is not None else None


def swaps(node: fx.Node) -> bool:
    """Whether a node transposes the last two dims of its operand and does nothing else."""
    ndim = len(shape_of(node))
    args: Any = node.args
    if node.target is aten.permute.default:
        order = [d % ndim for d in args[1]]
        return ndim >= 2 and order == [*range(ndim - 2), ndim - 1, ndim - 2]
    if node.target is aten.transpose.int:
        return {args[1] % ndim, args[2] % ndim} == {ndim - 2, ndim - 1}
    return node.target is aten.t.default and ndim == 2


def copies(node: fx.Node) -> bool:
    """Whether a node returns its operand with the same shape, dtype and elements."""
    inside = source(node)
    if node.target not in COPIES or inside is None:
        return False
    old, new = tensor_value(inside), tensor_value(node)
    return old is not None and new is not None and (old.shape, old.dtype) == (new.shape, new.dtype)


def root(node: fx.Node) -> tuple[fx.Node, bool]:
    """Take off all copies and transposes.

    Returns:
        The node that is left, and whether `node` is its transpose.
    """
    turned = False
    while swaps(node) or copies(node):
        turned ^= swaps(node)
        inside = source(node)
        assert inside is not None
        node = inside
    return node, turned


def any_strides(graph: fx.Graph) -> None:
    """Replace `view` by `reshape`, which copies where a view is impossible, as in a weight in channels_last."""
    for node in graph.nodes:
        if node.target is aten.view.default:
            node.target = aten.reshape.default


def flipped(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Insert the transpose of a matrix, or find it.

    Args:
        node: [..., m, n].

    Returns:
        A view [..., n, m].
    """
    if swaps(node):
        return node.all_input_nodes[0]
    ndim = len(shape_of(node))
    return insert_call(graph, aten.permute.default, (node, [*range(ndim - 2), ndim - 1, ndim - 2]))


@dataclass(frozen=True, slots=True)
class Product:
    """The value alpha * left @ right + beta * added. All three matrices have one dtype.

    Attributes:
        left, right: [..., m, k] and [..., k, n].
        added: [..., m, n]; None if nothing is added.
    """

    left: fx.Node
    right: fx.Node
    alpha: Factor = 1.0
    added: fx.Node | None = None
    beta: Factor = 0.0

    @property
    def pair(self) -> tuple[fx.Node, fx.Node]:
        """Both factors, `left` first."""
        return self.left, self.right


def product_of(node: fx.Node) -> Product | None:
    """Read a call of mm, bmm, addmm or baddbmm.

    Returns:
        The product; None for all other nodes, and if the addend is broadcast or of another dtype.
    """
    value, pair = tensor_value(node), factors(node)
    if pair is None or node.target not in LIBRARY_PRODUCTS or value is None or not value.dtype.is_floating_point:
        return None
    more = addend(node)
    if more is None:
        return Product(*pair)
    alpha, beta = (number(node.kwargs.get(name, 1.0)) for name in ("alpha", "beta"))
    kept = tensor_value(more)
    assert kept is not None
    if alpha is None or beta is None or (kept.shape, kept.dtype) != (value.shape, value.dtype):
        return None
    return Product(*pair, alpha, more, beta)


@dataclass(frozen=True, slots=True)
class MatrixTerm:
    """A number times a matrix."""

    factor: Factor
    node: fx.Node


def terms(node: fx.Node) -> tuple[MatrixTerm, ...]:
    """Read a node as one of its operands times a number, or as the sum of two of these.

    Returns:
        The terms, whose nodes have the shape and dtype of the result; empty if the node is something else.
    """
    args: Any = node.args
    found: Sequence[tuple[Any, Any]] = ()
    alpha = number(args[2] if len(args) > 2 else node.kwargs.get("alpha", 1.0))
    match node.target:
        case aten.add.Tensor:
            found = [(1.0, args[0]), (alpha, args[1])]
        case aten.sub.Tensor:
            found = [(1.0, args[0]), (alpha and times(-1.0, alpha), args[1])]
        case aten.neg.default:
            found = [(-1.0, args[0])]
        case aten.mul.Tensor | aten.mul.Scalar:
            left, right = number(args[0]), number(args[1])
            found = [(right, args[0])] if left is None else [(left, args[1])]
        case aten.div.Tensor | aten.div.Scalar:
            divisor = number(args[1])
            if isinstance(divisor, float) and divisor and not node.kwargs:
                found = [(1.0 / divisor, args[0])]
        case aten.lerp.Scalar:
            weight = number(args[2])
            if weight is not None:
                found = [(minus(1.0, weight), args[0]), (weight, args[1])]
    if not all(factor is not None and keeps_form(operand, node) for factor, operand in found):
        return ()
    return tuple(MatrixTerm(factor, operand) for factor, operand in found)


def keeps_form(operand: Any, node: fx.Node) -> bool:
    """Whether an operand has the shape and the dtype of the result, and the dtype is a floating one."""
    value = tensor_value(node)
    own = tensor_value(operand) if isinstance(operand, fx.Node) else None
    return (
        own is not None
        and value is not None
        and value.dtype.is_floating_point
        and (own.shape, own.dtype) == (value.shape, value.dtype)
    )


def scaled(node: fx.Node) -> MatrixTerm:
    """Take off all numbers by which a matrix was multiplied."""
    own = terms(node)
    if len(own) != 1:
        return MatrixTerm(1.0, node)
    inside = scaled(own[0].node)
    return MatrixTerm(times(own[0].factor, inside.factor), inside.node)


def identity(node: fx.Node) -> bool:
    """Whether a node is the identity matrix [n, n]."""
    shape = shape_of(node)
    return node.target in (aten.eye.default, aten.eye.m) and len(shape) == 2 and shape[0] == shape[1]


def shifted(node: fx.Node) -> MatrixTerm | None:
    """Read matrix + factor * I, written as a change of the main diagonal.

    Returns:
        The matrix together with the factor of I; None if the node is something else.
    """
    if node.target is not aten.diagonal_scatter.default or not main_diagonal(node.args[2:], shape_of(node)):
        return None
    matrix, diagonal = node.args[0], node.args[1]
    if not (isinstance(diagonal, fx.Node) and isinstance(matrix, fx.Node) and diagonal.target is aten.add.Tensor):
        return None
    old, factor = diagonal.args[0], number(diagonal.args[1])
    plain = not diagonal.kwargs and len(diagonal.args) == 2 and factor is not None
    own = isinstance(old, fx.Node) and old.target is aten.diagonal.default and old.args[0] is matrix
    if not (own and plain and main_diagonal(old.args[1:], shape_of(node))):  # type: ignore[union-attr]
        return None
    assert factor is not None
    return MatrixTerm(factor, matrix)


def main_diagonal(args: Sequence[Any], shape: Sequence[int]) -> bool:
    """Whether the arguments of a diagonal mean the main one of the last two dims.

    Args:
        shape: the shape of the matrix.
    """
    defaults: list[Any] = [0, 0, 1]
    offset, *dims = [*args, *defaults[len(args) :]]
    ndim = len(shape)
    return offset == 0 and {d % ndim for d in dims} == {ndim - 2, ndim - 1}
