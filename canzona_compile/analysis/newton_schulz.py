"""Find iterations X <- p(X X^T) X in a graph, Newton-Schulz and others, by their algebra and not by their spelling.

The search begins at a matrix X whose Gram matrix G = X X^T the graph forms. It follows all values p(G) and p(G) X, with
p a polynomial, through products, sums and transposes. If the rest of the graph reads only one of these values, and that
value is a p(G) X, then it is the next iterate. For tall matrices G is X^T X, and everything is transposed. Iterations
begin with a matrix that the graph divides by its norm.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, TypeAlias

import torch
from torch import fx

from canzona_compile.analysis.linear_algebra import (
    copies,
    identity,
    number,
    product_of,
    root,
    shape_of,
    shifted,
    swaps,
    terms,
)
from canzona_compile.analysis.linear_algebra import source as source_of
from canzona_compile.ir.fx_utils import ancestors, casts, insert_call, tensor_value
from canzona_compile.kernels.ops import DIV_CAST

aten = torch.ops.aten

Polynomial: TypeAlias = tuple[float, ...]  # coefficients in ascending order; the first one is that of the identity


@dataclass(frozen=True, slots=True)
class PolynomialForm:
    """A value p(G), p(G) Y or Y^T p(G), where Y is the wide matrix.

    Attributes:
        flipped: the value is Y^T p(G), the transpose of p(G) Y.
    """

    polynomial: Polynomial
    square: bool
    flipped: bool = False

    @property
    def degree(self) -> int:
        """The degree of the polynomial; coefficients of zero do not count."""
        return max((i for i, c in enumerate(self.polynomial) if c), default=0)


@dataclass(frozen=True, slots=True)
class Iterate:
    """One step Y <- p(G) Y of the wide matrix Y [..., m, n].

    Attributes:
        flipped: both nodes are the transpose [..., n, m] of Y.
    """

    before: fx.Node
    after: fx.Node
    flipped: bool
    polynomial: Polynomial


@dataclass(frozen=True, slots=True)
class ProductChain:
    """Iterates that follow one another. Only the next iterate reads a value between two of them."""

    steps: tuple[Iterate, ...]

    @property
    def start(self) -> fx.Node:
        """The wide matrix before the first step."""
        return self.steps[0].before

    @property
    def end(self) -> fx.Node:
        """The wide matrix after the last step."""
        return self.steps[-1].after

    @property
    def flipped(self) -> bool:
        """Whether the nodes are the transpose [..., n, m] of the wide matrix."""
        return self.steps[0].flipped

    @property
    def polynomials(self) -> tuple[Polynomial, ...]:
        """The polynomial of each step."""
        return tuple(step.polynomial for step in self.steps)


def chains(graph: fx.Graph) -> tuple[ProductChain, ...]:
    """Find all iterations of a graph."""
    bases = gram_bases(graph)
    after: dict[fx.Node, Iterate] = {}
    for base, flipped in bases.items():
        if step := iterate(graph, base, flipped, bases):
            after[base] = step
    follows = {s.after for s in after.values() if linked(s, after)}
    found = []
    for base, step in after.items():
        if base in follows:
            continue
        steps = [step]
        while linked(steps[-1], after):
            steps.append(after[steps[-1].after])
        found.append(ProductChain(tuple(steps)))
    return tuple(found)


def linked(step: Iterate, after: Mapping[fx.Node, Iterate]) -> bool:
    """Whether another iterate begins with the result of this one, and nothing else reads that result."""
    following = after.get(step.after)
    if following is None or following.flipped != step.flipped:
        return False
    return ancestors([following.after], stop={step.after}).issuperset(step.after.users)


def gram_bases(graph: fx.Graph) -> dict[fx.Node, bool]:
    """Find the matrices whose Gram matrix the graph forms.

    Returns:
        For each matrix X, whether the graph forms X^T X (True) or X X^T (False). If it forms both, the first counts.
    """
    found: dict[fx.Node, bool] = {}
    for node in graph.nodes:
        if product := product_of(node):
            (left, first), (right, second) = map(root, product.pair)
            if left is right and first != second:
                found.setdefault(left, first)
    return found


def iterate(graph: fx.Graph, base: fx.Node, flipped: bool, bases: Mapping[fx.Node, bool]) -> Iterate | None:
    """Find the iterate that begins with a matrix.

    Args:
        bases: all results of `gram_bases`. The search stops where another iterate may begin.

    Returns:
        The iterate; None if the rest of the graph reads several values, or one that is no p(G) Y.
    """
    forms = {base: PolynomialForm((1.0,), False, flipped)}
    ends: set[fx.Node] = set()
    for node in graph.nodes:
        own = form_of(node, forms) if node.op == "call_function" else None
        if own is None or node in ends or any(n in ends for n in node.all_input_nodes):
            continue
        forms[node] = own
        if node in bases and not own.square and own.degree:
            ends.add(node)
    leaving = {
        root(node)[0]
        for node, own in forms.items()
        if node is not base and own.degree and (node in ends or any(user not in forms for user in node.users))
    }
    if len(leaving) != 1:
        return None
    (after,) = leaving
    own = forms.get(after)
    if own is None or own.square or own.flipped != flipped:
        return None
    return Iterate(base, after, flipped, own.polynomial)


def form_of(node: fx.Node, forms: Mapping[fx.Node, PolynomialForm]) -> PolynomialForm | None:
    """The form of a node, from the forms of the nodes before it; None if it has none."""
    if identity(node):
        return PolynomialForm((1.0,), True)
    if not any(n in forms for n in node.all_input_nodes):
        return None
    if swaps(node) or copies(node):
        inside = source_of(node)
        own = forms.get(inside) if inside is not None else None
        if own is None or own.square or not swaps(node):
            return own
        return PolynomialForm(own.polynomial, False, not own.flipped)
    if product := product_of(node):
        left, right = (forms.get(n) for n in product.pair)
        if left is None or right is None or not isinstance(product.alpha, float):
            return None
        own = multiplied(left, right)
        if own is None or product.added is None:
            return own and weighted(product.alpha, own)
        more = forms.get(product.added)
        if more is None or not isinstance(product.beta, float):
            return None
        return added(weighted(product.alpha, own), weighted(product.beta, more))
    if (shift := shifted(node)) and shift.node in forms and isinstance(shift.factor, float):
        return added(forms[shift.node], PolynomialForm((shift.factor,), True))
    found: PolynomialForm | None = None
    for term in terms(node):
        own = forms.get(term.node)
        if own is None or not isinstance(term.factor, float):
            return None
        own = weighted(term.factor, own)
        found = own if found is None else added(found, own)
        if found is None:
            return None
    return found


def multiplied(left: PolynomialForm, right: PolynomialForm) -> PolynomialForm | None:
    """The form of left @ right; None if it has none."""
    p = convolved(left.polynomial, right.polynomial)
    if left.square and right.square:
        return PolynomialForm(p, True)
    if left.square and not right.flipped:
        return PolynomialForm(p, False)
    if right.square and left.flipped:
        return PolynomialForm(p, False, True)
    if not left.square and not right.square and right.flipped and not left.flipped:
        return PolynomialForm((0.0, *p), True)  # p(G) Y Y^T q(G)
    return None


def convolved(p: Polynomial, q: Polynomial) -> Polynomial:
    """The product of two polynomials."""
    result = [0.0] * (len(p) + len(q) - 1)
    for i, a in enumerate(p):
        for j, b in enumerate(q):
            result[i + j] += a * b
    return tuple(result)


def weighted(factor: float, form: PolynomialForm) -> PolynomialForm:
    """The form of a number times a value."""
    return PolynomialForm(tuple(factor * c for c in form.polynomial), form.square, form.flipped)


def added(a: PolynomialForm, b: PolynomialForm) -> PolynomialForm | None:
    """The form of a + b; None if only one of them is square, or only one flipped."""
    if (a.square, a.flipped) != (b.square, b.flipped):
        return None
    return PolynomialForm(
        tuple(x + y for x, y in zip_longest(a.polynomial, b.polynomial, fillvalue=0.0)), a.square, a.flipped
    )


# -- the division by the norm ---------------------------------------------------------------------

# The operators that `normalised_as` takes a second time.
NORMALISING = frozenset(
    {
        *(aten.permute.default, aten.transpose.int, aten.t.default, aten.expand.default, aten.clamp.default),
        *(aten.div.Tensor, aten.mul.Tensor, aten.add.Tensor, aten.clamp_min.default, aten.linalg_vector_norm.default),
    }
)


def normalised(node: fx.Node) -> bool:
    """Whether a graph divides a matrix, or each of a stack, by its Frobenius norm or by something larger."""
    node = origin(node)
    args: Any = node.args
    if node.target is not aten.div.Tensor or not isinstance(args[0], fx.Node):
        return False
    matrix, norm = args
    while isinstance(norm, fx.Node) and no_less(norm):
        norm = source_of(norm)
    return isinstance(norm, fx.Node) and frobenius(norm) and origin(norm.all_input_nodes[0]) is origin(matrix)


def no_less(node: fx.Node) -> bool:
    """Whether a node is a cast, a broadcast, or no less than its operand: with an eps, a factor, or clamped."""
    args: Any = node.args
    match node.target:
        case aten._to_copy.default | aten.expand.default | aten.clamp_min.default:
            return True
        case aten.clamp.default:
            return (len(args) < 3 or args[2] is None) and "max" not in node.kwargs
        case aten.add.Tensor | aten.mul.Tensor:
            more, least = number(args[1]), 0.0 if node.target is aten.add.Tensor else 1.0
            return isinstance(more, float) and more >= least and not node.kwargs
    return False


def frobenius(node: fx.Node) -> bool:
    """Whether a node is the norm of all of a matrix, beside the matrix if it is one of a stack."""
    args: Any = node.args
    if node.target is not aten.linalg_vector_norm.default or set(node.kwargs) - {"dtype"}:
        return False
    given: list[Any] = [*args[1:4], *[2, None, False][len(args) - 1 :]]
    order, dims, kept = given
    ndim = len(shape_of(args[0]))
    whole = not dims or {d % ndim for d in dims} == {ndim - 2, ndim - 1}
    return order == 2 and whole and (ndim == 2 or not dims or bool(kept))


def origin(node: fx.Node) -> fx.Node:
    """Take all transposes, copies and casts off a node, and return the node that is left."""
    while True:
        node = root(node)[0]
        inside = source_of(node)
        if node.target is not aten._to_copy.default or inside is None:
            return node
        node = inside


def normalised_as(graph: fx.Graph, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    """Insert a normalised 16-bit matrix a second time, at the insert point, rounded at the end alone.

    The norm is summed in float32. It and the division read the matrix as it was before the graph rounded it.
    """
    made: dict[fx.Node, fx.Node] = {}

    def again(node: fx.Node, inside: Callable[[fx.Node], fx.Node]) -> fx.Node:
        target: Any = node.target
        args, kwargs = fx.map_arg(node.args, inside), fx.map_arg(node.kwargs, inside)
        kept = {name: value for name, value in kwargs.items() if name != "dtype"}
        if target is aten.linalg_vector_norm.default:
            kept["dtype"] = torch.float32
        elif args == node.args:
            return node
        return insert_call(graph, target, args, kept, name=target.overloadpacket.__name__)

    def unrounded(node: fx.Node) -> fx.Node:
        value, inside = tensor_value(node), source_of(node)
        if value is None or value.dtype.itemsize > 2 or not value.dtype.is_floating_point:
            return node
        if node not in made:
            before = None if inside is None else tensor_value(inside)
            if casts(node) and before is not None and before.dtype.is_floating_point and before.dtype.itemsize <= 4:
                made[node] = unrounded(inside)  # type: ignore[arg-type]
            else:
                made[node] = again(node, unrounded) if node.target in NORMALISING else node
        return made[node]

    def divided(node: fx.Node) -> fx.Node:
        if node.target is not aten.div.Tensor:
            inside = source_of(node)
            return divided(inside) if casts(node) and inside is not None else again(node, divided)
        operands = [unrounded(own) for own in node.args if isinstance(own, fx.Node)]
        return insert_call(graph, DIV_CAST, tuple(operands), {"dtype": dtype})

    return divided(node)
