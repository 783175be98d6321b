"""Prove from a graph alone which of its matrices are symmetric.

A product X X^T is symmetric. Sums, scalings, elementwise functions, casts and transposes of symmetric matrices are
symmetric, and so are products of symmetric matrices that commute, P S P^T and V diag(w) V^T. Two matrices commute if
they are polynomials of one symmetric matrix, their *generator*. Multiples of the identity commute with every matrix.

A leaf of the state is symmetric if its value before the first step is symmetric and every variant of the step keeps it
so. This file proves the second condition, by induction over all variants. Who has the values checks the first one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from canzona_compile.analysis.linear_algebra import (
    Product,
    copies,
    identity,
    product_of,
    root,
    shape_of,
    shifted,
    swaps,
    terms,
)
from canzona_compile.analysis.linear_algebra import source as source_of
from canzona_compile.ir.fx_utils import outputs, pointwise, tensor_value
from canzona_compile.ir.step import Placed

aten = torch.ops.aten

# Pointwise by torch's tags, or copies, but not a function of the operand's elements alone.
UNRELATED = (aten.empty_like.default,)


@dataclass(frozen=True, slots=True)
class Symmetric:
    """A matrix is symmetric and a polynomial of `generator`, or, if that is None, a multiple of the identity."""

    generator: fx.Node | None


SymmetricValues = dict[fx.Node, Symmetric]


def symmetric_values(graph: fx.Graph, leaves: Collection[str] = ()) -> SymmetricValues:
    """Find the matrices [..., n, n] of a graph that are symmetric if the placeholders `leaves` are."""
    known: SymmetricValues = {}
    for node in graph.nodes:
        shape = shape_of(node)
        if len(shape) < 2 or shape[-1] != shape[-2]:
            continue
        found = None
        if node.op == "placeholder":
            found = Symmetric(node) if str(node.target) in leaves else None
        elif node.op == "call_function":
            found = proof(node, known)
        if found is not None:
            known[node] = found
    return known


def symmetric_leaves(variants: Sequence[Placed], candidates: Collection[str]) -> frozenset[str]:
    """Find the leaves of the owner's state that every variant of a step keeps symmetric.

    Args:
        variants: all variants of one step, cut for one kind of layout.
        candidates: leaves that are symmetric before the step.
    """
    names = set(candidates)
    while True:
        lost = {name for cut in variants for name in names if not keeps(cut, name, names)}
        if not lost:
            return frozenset(names)
        names -= lost


def keeps(cut: Placed, name: str, names: Collection[str]) -> bool:
    """Does a variant keep the leaf `name` symmetric if all leaves `names` are symmetric before?"""
    if name in cut.fragment_writes:
        return False
    if name not in cut.owner_writes:
        return True
    new = outputs(cut.compute)[len(cut.scatter) + cut.owner_writes.index(name)]
    return new in symmetric_values(cut.compute, names)


def proof(node: fx.Node, known: SymmetricValues) -> Symmetric | None:
    """The proof that a node is symmetric, given the proofs for the nodes before it; None if no rule applies."""
    if swaps(node) or copies(node):
        inside = source_of(node)
        return known.get(inside) if inside is not None else None
    if identity(node):
        return Symmetric(None)
    if product := product_of(node):
        own = product_proof(node, product, known)
        if own is None or product.added is None:
            return own
        return together(node, [own, known.get(product.added)])
    if shift := shifted(node):
        return known.get(shift.node)
    if linear := terms(node):
        return together(node, [known.get(term.node) for term in linear])
    return elementwise(node, known)


def together(node: fx.Node, proofs: Sequence[Symmetric | None]) -> Symmetric | None:
    """The proof for a node that is made of symmetric matrices by sums and products of commuting ones.

    If the matrices have several generators, the node is a generator of its own. None if a proof is missing.
    """
    if None in proofs:
        return None
    generators = {p.generator for p in proofs if p is not None} - {None}
    return Symmetric(next(iter(generators), None)) if len(generators) < 2 else Symmetric(node)


def commute(a: Symmetric | None, b: Symmetric | None) -> bool:
    """Are both matrices symmetric, and do they commute?"""
    if a is None or b is None:
        return False
    return a.generator is None or b.generator is None or a.generator is b.generator


def product_proof(node: fx.Node, product: Product, known: SymmetricValues) -> Symmetric | None:
    """The proof for left @ right, without the addend."""
    (left, left_flipped), (right, right_flipped) = map(root, product.pair)
    a, b = known.get(left), known.get(right)
    if commute(a, b):
        return together(node, [a, b])
    transposes = left is right and left_flipped != right_flipped
    return Symmetric(node) if transposes or congruent(product, known) else None


def congruent(product: Product, known: SymmetricValues) -> bool:
    """Is a product (P S) P^T or P (S P^T), with S symmetric or diagonal?"""
    for inner, outer in (product.pair, product.pair[::-1]):
        inside = product_of(inner)
        if inside is not None and inside.added is None:
            p, s = inside.pair if inner is product.left else inside.pair[::-1]
            if root(s)[0] in known and transposed(p, outer, known):
                return True
        if any(transposed(v, outer, known) for v in columns_scaled(inner, by_column=inner is product.left)):
            return True
    return False


def transposed(p: fx.Node, q: fx.Node, known: Mapping[fx.Node, Symmetric]) -> bool:
    """Is q the transpose of p?"""
    (a, a_flipped), (b, b_flipped) = root(p), root(q)
    return a is b and (a_flipped != b_flipped or a in known)


def columns_scaled(node: fx.Node, by_column: bool) -> list[fx.Node]:
    """The matrices V for which an elementwise product is V diag(w), or diag(w) V if not `by_column`."""
    if node.target is not aten.mul.Tensor:
        return []
    broadcast = -2 if by_column else -1  # along this dim all factors are equal
    found = []
    for v, w in (node.args[:2], node.args[1::-1]):
        if isinstance(v, fx.Node) and isinstance(w, fx.Node) and shape_of(v) == shape_of(node):
            own = (1, 1, *shape_of(w))
            if tensor_value(w) is not None and own[broadcast] == 1:
                found.append(v)
    return found


def elementwise(node: fx.Node, known: SymmetricValues) -> Symmetric | None:
    """The proof for an elementwise function of symmetric matrices and of tensors with one number per matrix."""
    random = isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags
    if not pointwise(node) or random or node.target in UNRELATED:
        return None
    tensors = [n for n in node.all_input_nodes if tensor_value(n) is not None]
    matrices = [n for n in tensors if not single(n)]
    if not matrices or not all(n in known and shape_of(n) == shape_of(node) for n in matrices):
        return None
    scaling = node.target in (aten.mul.Tensor, aten.div.Tensor) and len(tensors) == 2 and len(matrices) == 1
    floats = all(v is not None and v.dtype.is_floating_point for v in map(tensor_value, (node, *matrices)))
    cast = node.target is aten._to_copy.default and floats  # to integers is a function that loses commutation
    over = node.target is aten.div.Tensor and node.args[0] not in matrices  # a number over each element
    return known[matrices[0]] if (scaling and not over) or cast else Symmetric(node)


def single(node: fx.Node) -> bool:
    """Has a tensor one number for all elements of a matrix?"""
    shape = (1, 1, *shape_of(node))
    return shape[-1] == shape[-2] == 1
