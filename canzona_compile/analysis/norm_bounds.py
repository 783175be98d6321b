"""Find upper bounds of matrix norms from the way a graph normalises matrices, and redo normalisations in float32."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from canzona_compile.analysis.linear_algebra import copies, for_any_strides, number, root, shape_of, source, swaps
from canzona_compile.ir.fx_utils import casts, insert_call, tensor_value

aten = torch.ops.aten

SAME_ELEMENTS = (aten.view.default, aten.expand.default, aten.unsqueeze.default, aten.squeeze.default)


def norm_bound(node: fx.Node) -> float | None:
    """Find an upper bound of the Frobenius norm of a matrix, or of every matrix in a stack.

    The bound holds in exact arithmetic. If the graph normalises in 16 bits, rounding may make the norm exceed it: use
    `Wide` to normalise in float32.

    Args:
        node: a node whose value is a tensor [..., m, n].

    Returns:
        The bound, or None if nothing in the graph bounds the norm.
    """
    args: Any = node.args
    if swaps(node) or copies(node) or node.target in (aten._to_copy.default, aten.neg.default):
        inside = source(node)
        return norm_bound(inside) if inside is not None else None
    if node.target in (aten.mul.Tensor, aten.div.Tensor) and not node.kwargs:
        first, second = args
        if (factor := number(second)) is not None:
            inner = norm_bound(first) if isinstance(factor, float) and factor else None
            if inner is None or not isinstance(factor, float):
                return None
            return inner * abs(factor) if node.target is aten.mul.Tensor else inner / abs(factor)
        if not (isinstance(first, fx.Node) and isinstance(second, fx.Node)):
            return None
        if node.target is aten.div.Tensor:
            least = least_over_norm(second, first, 1)
        else:
            least = least_inverse(second, first) or least_inverse(first, second)
        return 1.0 / least if least else None
    return None


def least_inverse(node: fx.Node, matrix: fx.Node) -> float:
    """Find f so that 1 / node >= f * |matrix|, where |.| is the Frobenius norm; 0.0 if no f is known."""
    inside = source(node)
    if inside is None:
        return 0.0
    if node.target is aten.reciprocal.default:
        return least_over_norm(inside, matrix, 1)
    if node.target is aten.rsqrt.default:
        return math.sqrt(least_over_norm(inside, matrix, 2))
    return 0.0


def least_over_norm(node: fx.Node, matrix: fx.Node, power: int) -> float:
    """Find f so that node >= f * |matrix|^power, where |.| is the Frobenius norm; 0.0 if no f is known."""
    args: Any = node.args
    inside = source(node)
    if inside is None:
        return 0.0
    match node.target:
        case aten.linalg_vector_norm.default:
            euclidean = (len(args) < 2 or args[1] == 2) and set(node.kwargs) <= {"dtype"}
            fits = euclidean and reduces(args[2:], shape_of(inside)) and same_elements(inside, matrix)
            return float(fits and power == 1)
        case aten.sum.default | aten.sum.dim_IntList:
            times_itself = inside.target is aten.mul.Tensor and inside.args[0] is inside.args[1]
            squares = times_itself or (inside.target is aten.pow.Tensor_Scalar and inside.args[1] == 2)
            of = source(inside)
            fits = squares and of is not None and reduces(args[1:], shape_of(inside)) and same_elements(of, matrix)
            fits = fits and set(node.kwargs) <= {"dtype"}
            return float(fits and power == 2)
        case aten.sqrt.default:
            return math.sqrt(least_over_norm(inside, matrix, 2 * power)) if power == 1 else 0.0
        case aten.clamp.default if len(args) < 3 or args[2] is None:
            return least_over_norm(inside, matrix, power) if "max" not in node.kwargs else 0.0
        case aten.clamp_min.default:
            return least_over_norm(inside, matrix, power)
        case aten.maximum.default:
            found = [least_over_norm(n, matrix, power) for n in args if isinstance(n, fx.Node)]
            return max(found)
        case aten.add.Tensor:
            more = number(args[1])
            positive = isinstance(more, float) and more >= 0 and not node.kwargs
            return least_over_norm(inside, matrix, power) if positive else 0.0
        case aten.mul.Tensor:
            factor = number(args[1])
            return factor * least_over_norm(inside, matrix, power) if isinstance(factor, float) and factor > 0 else 0.0
        case aten._to_copy.default:
            return least_over_norm(inside, matrix, power)
    moved = node.target in SAME_ELEMENTS and beside(shape_of(inside), shape_of(node))
    return least_over_norm(inside, matrix, power) if moved else 0.0


def beside(old: tuple[int, ...], new: tuple[int, ...]) -> bool:
    """Whether a change of shape leaves each number of a tensor beside the same matrix.

    Args:
        old: the shape before. The tensor has one number per matrix of a stack, or a single number.
        new: the shape after.
    """
    return math.prod(old) == 1 or (old[-2:] == (1, 1) and new[:-2] == old[:-2] and len(new) == len(old))


def reduces(args: Any, shape: tuple[int, ...]) -> bool:
    """Whether a reduction goes over both of the last two dims of `shape`.

    Args:
        args: the arguments of the reduction after its operand: dims, and then keepdim. Either may be absent.
        shape: the shape of the operand.
    """
    dims = args[0] if args else None
    ndim = len(shape)
    if not dims:
        return True
    kept = ndim == 2 or (len(args) > 1 and bool(args[1]))  # without keepdim a number may broadcast to another matrix
    return {ndim - 2, ndim - 1} <= {d % ndim for d in dims} and kept


def same_elements(a: fx.Node, b: fx.Node) -> bool:
    """Whether two nodes are the same matrix, apart from transposes, copies and casts."""
    return origin(a) is origin(b)


def origin(node: fx.Node) -> fx.Node:
    """Take all transposes, copies and casts off a node, and return the node that is left."""
    while True:
        node = root(node)[0]
        inside = source(node)
        if node.target is not aten._to_copy.default or inside is None:
            return node
        node = inside


class Wide:
    """Inserts nodes that compute 16-bit values a second time, in float32.

    Args:
        graph: gets the new nodes, at its insert point.
    """

    OPERATORS = frozenset(
        {
            *(aten.permute.default, aten.transpose.int, aten.t.default, *SAME_ELEMENTS, aten.neg.default),
            *(aten.div.Tensor, aten.mul.Tensor, aten.add.Tensor, aten.sum.default, aten.sum.dim_IntList),
            *(aten.linalg_vector_norm.default, aten.sqrt.default, aten.rsqrt.default, aten.reciprocal.default),
            *(aten.clamp.default, aten.clamp_min.default, aten.maximum.default, aten.pow.Tensor_Scalar),
        }
    )

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.made: dict[fx.Node, fx.Node] = {}

    def of(self, node: fx.Node) -> fx.Node:
        """Insert the float32 version of a node.

        Returns:
            The new node; `node` itself if it is no tensor of 16-bit floats.
        """
        value = tensor_value(node)
        if value is None or value.dtype.itemsize > 2 or not value.dtype.is_floating_point:
            return node
        if node not in self.made:
            self.made[node] = self._made(node, value)
        return self.made[node]

    def _made(self, node: fx.Node, value: torch.Tensor) -> fx.Node:
        """Compute a node in float32 from its operands if all of `OPERATORS` allow that, else cast it."""
        inside = source(node)
        if casts(node) and inside is not None:
            before = tensor_value(inside)
            assert before is not None
            if before.dtype.itemsize <= 4 and before.dtype.is_floating_point:
                return self.of(inside)  # this cast rounds the value: leave it out
        if node.target in self.OPERATORS:
            args: Any = fx.map_arg(node.args, self.of)
            kwargs = {name: v for name, v in fx.map_arg(node.kwargs, self.of).items() if name != "dtype"}
            target = for_any_strides(node.target, args[0])  # a float32 operand may have other strides
            return insert_call(self.graph, target, args, kwargs, name=node.target.overloadpacket.__name__)
        return insert_call(self.graph, aten._to_copy.default, (node,), {"dtype": torch.float32})
