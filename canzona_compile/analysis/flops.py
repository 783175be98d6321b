"""How many FLOPs a graph takes and how many bytes it moves, as formulas in the dims of the matrix.

These are counts of the graph that is given, without any rate: `analysis.roofline` and `analysis.step_time` make seconds
of them. A product counts in full, 2mkn FLOPs, also where a kernel computes one half of a symmetric result.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, TypeVar

import sympy
import torch
from torch import fx

from canzona_compile.ir.compiled_call import CompiledCall, opened
from canzona_compile.ir.fx_utils import is_operator, placeholders, tensor_value
from canzona_compile.ir.layout import Shape
from canzona_compile.ir.program_ops import operator_of
from canzona_compile.ir.step import Template, Wire
from canzona_compile.kernels.ops import GEMM_AXPBY, SYM_GEMM

aten = torch.ops.aten
Dims = tuple[sympy.Expr, ...]

NAMES = {1: ("n",), 2: ("m", "n"), 3: ("b", "m", "n"), 4: ("b", "m", "n", "k")}


def dim_symbols(ndim: int) -> tuple[sympy.Symbol, ...]:
    """Symbols for the dims of a parameter with `ndim` dims: m x n for a matrix, b x m x n for a stack."""
    names = NAMES.get(ndim, tuple(f"d{i}" for i in range(ndim)))
    return tuple(sympy.Symbol(name, positive=True, integer=True) for name in names)


def symbolic_flops(graph: fx.Graph, template: Template) -> sympy.Expr:
    """FLOPs of a graph, added up node by node: 2mkn per product, one per element elsewhere.

    Returns:
        A formula in the dims of the matrix (`dim_symbols`).
    """
    dims = symbolic_dims(graph, template)
    counted = (n for n in opened(graph) if n.op == "call_function" and (n in dims or decomposition(n)))
    return sympy.expand(sum((node_flops(n, dims) for n in counted), sympy.Integer(0)))


def symbolic_bytes(graph: fx.Graph, template: Template) -> sympy.Expr:
    """Bytes that a graph reads and writes in memory, if nothing is fused; views move nothing.

    Returns:
        A formula in the dims of the matrix (`dim_symbols`).
    """
    dims = symbolic_dims(graph, template)
    total: sympy.Expr = sympy.Integer(0)
    for node in dims:
        view = is_operator(node.target) and node.target.is_view
        if node.op == "call_function" and not view:
            for each in (node, *(n for n in node.all_input_nodes if n in dims)):
                total += each.meta["val"].dtype.itemsize * sympy.Mul(*dims[each])
    return sympy.expand(total)


def symbolic_dims(graph: fx.Graph, template: Template) -> dict[fx.Node, Dims]:
    """The dims of every tensor in a graph, in those of the parameter.

    They are followed through the graph, so that in a transposed Newton-Schulz m and n change places.
    A size that no operand explains is looked up among the parameter's dims and else left a number.
    Operators that compiled functions call are among them.
    """
    symbols = dim_symbols(len(template.shape))
    dims: dict[fx.Node, Dims] = {}
    for node in opened(graph):
        value = tensor_value(node)
        if isinstance(node.target, CompiledCall):
            inside = zip(placeholders(node.target.body), node.target.operands(node), strict=True)
            dims.update((inner, dims[outer]) for inner, outer in inside)
        elif value is not None:
            sizes = tuple(int(n) for n in value.shape)
            dims[node] = follow(node, sizes, dims, template.shape, symbols)
    return dims


def follow(
    node: fx.Node, sizes: Shape, dims: dict[fx.Node, Dims], shape: Shape, symbols: tuple[sympy.Symbol, ...]
) -> Dims:
    operands = [n for n in node.all_input_nodes if n in dims]
    if node.op == "placeholder" and sizes == shape:
        return symbols
    if node.target is aten.permute.default:
        order = node.args[1]
        assert isinstance(order, list | tuple)
        return tuple(dims[operands[0]][i] for i in order)  # type: ignore[index]
    if node.target in (aten.t.default, aten.transpose.int) and len(sizes) == 2:
        return dims[operands[0]][::-1]
    if (pair := factors(node)) and all(f in dims for f in pair):
        left, right = (turned(dims[f], flip) for f, flip in zip(pair, flips(node), strict=True))
        return (*left[:-1], right[-1])
    for operand in operands:
        if tuple(operand.meta["val"].shape) == sizes:
            return dims[operand]
    lookup = dict(zip(shape, symbols, strict=True))
    return tuple(lookup.get(n, sympy.Integer(n)) for n in sizes)


LIBRARY_PRODUCTS = {aten.mm.default: 0, aten.bmm.default: 0, aten.addmm.default: 1, aten.baddbmm.default: 1}


def factors(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The two factors of a matrix product node, as they stand in memory; see `flips`."""
    args: Any = node.args
    if (operator := operator_of(node)) in LIBRARY_PRODUCTS:
        first = LIBRARY_PRODUCTS[operator]
        left, right = args[first], args[first + 1]
    elif node.target is SYM_GEMM:
        left, right = args[0], args[1] if len(args) > 1 and args[1] is not None else args[0]
    elif node.target is GEMM_AXPBY:
        left, right = args[::-1] if node.kwargs.get("right") else args
    else:
        return None
    assert isinstance(left, fx.Node) and isinstance(right, fx.Node)
    return left, right


def flips(node: fx.Node) -> tuple[bool, bool]:
    """Whether each factor of a product enters it transposed, although memory holds it as is: A A^T names A twice."""
    if node.target is not SYM_GEMM:
        return False, False
    return (True, False) if node.kwargs.get("trans") else (False, True)


def addend(node: fx.Node) -> fx.Node | None:
    """The matrix that a product node adds to its product, if there is one."""
    args: Any = node.args
    if node.target in (aten.addmm.default, aten.baddbmm.default):
        found = args[0]
    elif node.target is GEMM_AXPBY:
        found = args[1]
    else:
        found = args[2] if node.target is SYM_GEMM and len(args) > 2 else None
    return found if isinstance(found, fx.Node) else None


Sizes = TypeVar("Sizes", bound=Sequence[Any])


def turned(sizes: Sizes, flip: bool) -> Sizes:
    """The dims, with the last two swapped if `flip`."""
    return (*sizes[:-2], sizes[-1], sizes[-2]) if flip else sizes  # type: ignore[return-value]


def inner(node: fx.Node, left: Sequence[Any]) -> Any:
    """The dim of a product's first factor that is summed over."""
    return left[-2] if flips(node)[0] else left[-1]


# FLOPs of LAPACK-like operators on n x n or m x n inputs, leading order (Golub and Van Loan, tables 5 and 8).
DECOMPOSITIONS = {
    "eigh": 9,
    "qr": 4,
    "svd": 22,
    "inv_ex": 2,
    "inv": 2,
    "solve_ex": 2,
    "cholesky_ex": sympy.Rational(1, 3),
    "cholesky": sympy.Rational(1, 3),
}


def decomposition(node: fx.Node) -> str:
    """The name of the decomposition that a node is; empty if it is none.

    Most decompositions return tuples, so the node itself has no dims.
    """
    if not is_operator(operator := operator_of(node)):
        return ""
    name = operator.overloadpacket.__name__.removeprefix("_").removeprefix("linalg_")
    return name if name in DECOMPOSITIONS else ""


def decomposition_flops(node: fx.Node, operand: Sequence[Any]) -> Any:
    """FLOPs of a decomposition of an operand with these dims, numbers or formulas."""
    m, n = operand[-2:]
    return sympy.Mul(*operand[:-2]) * DECOMPOSITIONS[decomposition(node)] * m * n * n


def node_flops(node: fx.Node, dims: dict[fx.Node, Dims]) -> sympy.Expr:
    if decomposition(node):
        return decomposition_flops(node, dims[node.all_input_nodes[0]])
    own = sympy.Mul(*dims[node])
    if pair := factors(node):
        return 2 * own * inner(node, dims[pair[0]])
    if is_operator(node.target) and node.target.is_view:
        return sympy.Integer(0)
    largest = max((sympy.Mul(*dims[n]) for n in node.all_input_nodes if n in dims), key=free_size, default=own)
    return largest if free_size(largest) > free_size(own) else own


@functools.cache
def free_size(expression: sympy.Expr) -> int:
    """A key that orders products of dims by their degree.

    Sympy makes a polynomial of a product to find it, and most nodes of a graph have the same few products.
    """
    return sum(sympy.degree(expression, s) for s in expression.free_symbols)


def flops_of(cost: sympy.Expr, shape: Sequence[int]) -> int:
    """The value of a formula for a matrix of `shape`, at least 1, so that every task counts."""
    return max(1, int(cost.subs(dict(zip(dim_symbols(len(shape)), shape, strict=True)))))


def bytes_of_wires(wires: Sequence[Wire]) -> int:
    """Bytes of the whole values of one matrix that cross between its fragments and its owner."""
    return sum(math.prod(wire.shape) * wire.itemsize for wire in wires)
