"""Write graphs whose products that are proved symmetric are computed by `canzona::sym_gemm`, one triangle only."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from canzona_compile.analysis.linear_algebra import (
    Factor,
    MatrixTerm,
    Product,
    any_strides,
    flipped,
    identity,
    keeps_form,
    plus,
    product_of,
    root,
    scaled,
    shape_of,
    shifted,
    source,
    swaps,
    terms,
    times,
    written,
)
from canzona_compile.analysis.symmetry_proof import SymmetricValues, symmetric_values
from canzona_compile.ir.fx_utils import drop_dead_code, insert_call, tensor_value
from canzona_compile.kernels.ops import GEMM_AXPBY, SYM_GEMM

aten = torch.ops.aten

MODEST = 2.0**10  # a factor from 1 / MODEST to MODEST may be multiplied after a product instead of before it


def rewritten(graph: fx.Graph, leaves: Collection[str] = ()) -> fx.Graph:
    """Rewrite a copy of a graph."""
    graph = copy.deepcopy(graph)
    known = symmetric_values(graph, leaves)
    for node in known:
        inside = source(node)
        if swaps(node) and inside in known:
            node.replace_all_uses_with(inside)
    Rewriter(drop_dead_code(graph), known).run()
    any_strides(graph)
    graph.lint()
    return graph


@dataclass(frozen=True, slots=True)
class Call:
    """One call of `sym_gemm`: alpha a b^T + beta c + diag I or, if `trans`, alpha a^T b + beta c + diag I.

    Attributes:
        b: the second factor; None stands for a.
        flip_b: whether b has to be transposed before the call.
    """

    a: fx.Node
    b: fx.Node | None
    trans: bool
    flip_b: bool
    alpha: Factor
    c: fx.Node | None = None
    beta: Factor = 0.0
    diag: Factor = 0.0

    def times(self, factor: Factor) -> Call:
        """The call whose result is `factor` times that of this one."""
        numbers = (times(factor, n) for n in (self.alpha, self.beta, self.diag))
        alpha, beta, diag = numbers
        return replace(self, alpha=alpha, beta=beta, diag=diag)


class Rewriter:
    """Rewrites one graph, in place.

    It finds a call for every symmetric product. A call may absorb the nodes that follow the product, such as a sum.
    Only calls that no other call has absorbed are written.
    """

    def __init__(self, graph: fx.Graph, known: SymmetricValues) -> None:
        self.graph, self.known = graph, known
        self.calls: dict[fx.Node, Call] = {}

    def run(self) -> None:
        """Write the calls for symmetric products first, and then those for other updates."""
        for node in list(self.graph.nodes):
            if node in self.known and (call := self.call_of(node)):
                self.calls[node] = call
        for node, call in self.calls.items():
            if not self.grows(node):
                self.write(node, call)
        drop_dead_code(self.graph)
        for node in list(self.graph.nodes):
            if node.users and node not in self.known:
                self.split(node)
                if node.users:
                    self.update(node)
        drop_dead_code(self.graph)

    # -- symmetric products ----------------------------------------------------------------------

    def call_of(self, node: fx.Node) -> Call | None:
        """The call that computes a symmetric value; None if the value is no product and absorbs none."""
        if product := product_of(node):
            return self.with_addend(self.bare(product), product)
        if (shift := shifted(node)) and self.only_use(shift.node, node):
            call = self.calls[shift.node]
            return replace(call, diag=plus(call.diag, shift.factor))
        return self.sum_of(node)

    def bare(self, product: Product) -> Call:
        """The call for a product without its addend. Its operands are no transposes, where that is possible."""
        (left, right), (first, second) = product.pair, map(root, product.pair)
        if first[0] is second[0] and first[1] != second[1]:
            return Call(first[0], None, first[1], False, product.alpha)
        (a, a_factor), (b, b_factor) = ((t.node, t.factor) for t in map(self.operand, product.pair))
        alpha = times(product.alpha, times(a_factor, b_factor))
        if self.symmetric(a) and self.symmetric(b):
            a, b = root(a)[0], root(b)[0]
            return Call(a, None if a is b else b, False, False, alpha)
        b, turned = root(right)
        return Call(left, b, False, not turned, product.alpha)

    def scaled(self, node: fx.Node) -> MatrixTerm:
        """Take off the numbers by which a node was multiplied. The result of a call keeps its numbers."""
        return MatrixTerm(1.0, node) if node in self.calls else scaled(node)

    def operand(self, node: fx.Node) -> MatrixTerm:
        """Take off the numbers by which a factor was multiplied, if they are constants and their product is `MODEST`.

        Other numbers stay, because they may keep the product in range.
        """
        term = self.scaled(node)
        modest = isinstance(term.factor, float) and 1.0 / MODEST <= abs(term.factor) <= MODEST
        return term if modest else MatrixTerm(1.0, node)

    def symmetric(self, node: fx.Node) -> bool:
        """Whether a node, or its transpose, is proved symmetric."""
        return root(node)[0] in self.known

    def with_addend(self, call: Call, product: Product) -> Call:
        """The call with the addend of a product, if it has one."""
        if product.added is None:
            return call
        added = self.scaled(product.added)
        return replace(call, c=added.node, beta=times(product.beta, added.factor))

    def sum_of(self, node: fx.Node) -> Call | None:
        """The call for a multiple of a product, or for the sum of one with another matrix.

        None if the node is no such sum, or if anything else reads the product.
        """
        own = terms(node)
        grown = [t for t in own if self.only_use(t.node, node)]
        for term in sorted(grown, key=lambda t: self.calls[t.node].c is not None):
            call = self.calls[term.node].times(term.factor)
            others = [t for t in own if t is not term]
            if not others:
                return call
            if others[0].node is term.node:
                return self.calls[term.node].times(plus(term.factor, others[0].factor))
            rest = self.scaled(others[0].node)
            factor = times(others[0].factor, rest.factor)
            if identity(rest.node):
                return replace(call, diag=plus(call.diag, factor))
            if call.c is None:
                return replace(call, c=rest.node, beta=factor)
            if call.c is rest.node:
                return replace(call, beta=plus(call.beta, factor))
        return None

    def only_use(self, inner: fx.Node, outer: fx.Node) -> bool:
        """Whether there is a call for `inner` and only `outer` reads its result."""
        return inner in self.calls and self.users(inner) == {outer}

    def users(self, node: fx.Node) -> set[fx.Node]:
        """The nodes that read a node. A diagonal that is read only to shift it counts as the shifted matrix."""
        found = set()
        for user in node.users:
            shift = [s for add in user.users for s in add.users if (t := shifted(s)) and t.node is node]
            found |= set(shift) if user.target is aten.diagonal.default and shift else {user}
        return found

    def grows(self, node: fx.Node) -> bool:
        """Whether another call has absorbed the call for `node`."""
        return any(user in self.calls and self.inside(node, user) for user in self.users(node))

    def inside(self, node: fx.Node, user: fx.Node) -> bool:
        """Whether the call for `user` has absorbed the call for `node`, instead of reading its result."""
        if not self.only_use(node, user) or product_of(user) is not None:
            return False
        call = self.calls[user]
        return node not in (call.a, call.b, call.c)

    def write(self, node: fx.Node, call: Call) -> None:
        """Replace a node by its call."""
        with self.graph.inserting_before(node):
            b = call.b
            if b is not None and call.flip_b:
                b = flipped(self.graph, b)
            args = (call.a, b, call.c) if call.c is not None else (call.a, b) if b is not None else (call.a,)
            numbers = {"alpha": (call.alpha, 1.0), "beta": (call.beta, 0.0), "diag": (call.diag, 0.0)}
            kwargs = {name: written(n, self.graph) for name, (n, default) in numbers.items() if n != default}
            kwargs |= {"trans": True} if call.trans else {}
            self.substitute(node, SYM_GEMM, args, kwargs)

    def substitute(self, node: fx.Node, target: Any, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        """Insert the call of an operator at the graph's insert point, and let all users of `node` read it instead."""
        new = insert_call(self.graph, target, args, kwargs)
        node.replace_all_uses_with(new)
        self.renew(node, new)

    def renew(self, node: fx.Node, new: fx.Node) -> None:
        """Let the calls and the proofs name the new node instead of the old one."""
        for key, call in self.calls.items():
            a, b, c = (new if n is node else n for n in (call.a, call.b, call.c))
            assert a is not None
            self.calls[key] = replace(call, a=a, b=b, c=c)
        if node in self.known:
            self.known[new] = self.known[node]

    # -- products that are not symmetric as a whole ------------------------------------------------

    def split(self, node: fx.Node) -> None:
        """Split a symmetric product from an addend that is not symmetric.

        16-bit products stay whole, because the split would round once more.
        """
        product, value = product_of(node), tensor_value(node)
        if product is None or product.added is None or value is None or value.dtype.itemsize < 4:
            return
        (left, flip), (right, other) = map(root, product.pair)
        if left is not right or flip == other or product.beta == 0.0:
            return
        with self.graph.inserting_before(node):
            alpha = {} if product.alpha == 1.0 else {"alpha": written(product.alpha, self.graph)}
            trans = {"trans": True} if flip else {}
            half = insert_call(self.graph, SYM_GEMM, (left,), {**alpha, **trans})
            beta = {} if product.beta == 1.0 else {"alpha": written(product.beta, self.graph)}
            self.substitute(node, aten.add.Tensor, (half, product.added), beta)

    def update(self, node: fx.Node) -> None:
        """Write alpha X + beta F X, or alpha X + beta X F, as one call of `gemm_axpby`."""
        product = product_of(node)
        if product is None or product.added is None:
            product = self.sum_with_product(node)
        if product is None or product.added not in product.pair:
            return
        right = product.added is product.left
        factor = product.right if right else product.left
        square = shape_of(factor)[-1] == shape_of(factor)[-2]
        if not square or not keeps_form(product.added, node):
            return
        with self.graph.inserting_before(node):
            numbers = {"alpha": product.beta, "beta": product.alpha}
            kwargs = {name: written(n, self.graph) for name, n in numbers.items() if n != 1.0}
            kwargs |= {"right": True} if right else {}
            self.substitute(node, GEMM_AXPBY, (factor, product.added), kwargs)

    def sum_with_product(self, node: fx.Node) -> Product | None:
        """Read a sum of a product and a matrix, each times a number, as a product with an addend.

        None for all other nodes, if the matrix is no factor of the product, and if another node reads the product.
        """
        own = terms(node)
        for term in own if len(own) == 2 else ():
            product = product_of(term.node)
            rest = next(t for t in own if t is not term)
            added = scaled(rest.node)
            if product is None or product.added is not None or set(term.node.users) != {node}:
                continue
            if added.node in product.pair:
                alpha, beta = times(term.factor, product.alpha), times(rest.factor, added.factor)
                return Product(product.left, product.right, alpha, added.node, beta)
        return None
