"""Prove from a graph alone which of its matrices are symmetric.

These matrices are symmetric:

- a product X X^T,
- sums, scalings, elementwise functions, casts and transposes of symmetric matrices,
- a product of symmetric matrices that commute,
- P S P^T and V diag(w) V^T, with S symmetric.

Two matrices commute if they are polynomials of one symmetric matrix, their *generator*. Multiples of the identity
commute with every matrix.

A leaf of the state is symmetric if its value before the first step is symmetric and every variant of the step keeps it
symmetric. This module proves the second condition, by induction over all variants. The ranks that hold the values
check the first one.
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
from canzona_compile.ir.fx_utils import is_operator, outputs, pointwise, tensor_value
from canzona_compile.ir.step import Placed

aten = torch.ops.aten

# Torch tags these as pointwise, or they look like copies. But their results do not depend on the operand's elements.
UNRELATED = (aten.empty_like.default,)


@dataclass(frozen=True, slots=True)
class Symmetric:
    """The proof that a matrix is symmetric.

    Attributes:
        generator: the matrix is a polynomial of this symmetric one. None: it is a multiple of the identity.
    """

    generator: fx.Node | None


SymmetricValues = dict[fx.Node, Symmetric]


def symmetric_values(graph: fx.Graph, leaves: Collection[str] = ()) -> SymmetricValues:
    """Find the symmetric matrices [..., n, n] of a graph."""
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
    """Find the leaves of the owner's state that every variant of a step keeps symmetric."""
    names = set(candidates)
    while True:
        lost = {name for cut in variants for name in names if not keeps(cut, name, names)}
        if not lost:
            return frozenset(names)
        names -= lost


def keeps(cut: Placed, name: str, names: Collection[str]) -> bool:
    """Whether a variant keeps the leaf `name` symmetric if all leaves `names` are symmetric before the step."""
    if name in cut.fragment_writes:
        return False
    if name not in cut.owner_writes:
        return True
    new = outputs(cut.compute)[len(cut.scatter) + cut.owner_writes.index(name)]
    return new in symmetric_values(cut.compute, names)


def proof(node: fx.Node, known: SymmetricValues) -> Symmetric | None:
    """Prove that a node is symmetric, from the proofs for the nodes before it. None if no rule applies."""
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
    """Prove that a sum of symmetric matrices, or a product of such that commute, is symmetric.

    Returns:
        The proof, with `node` as its own generator if the operands have several. None if an operand has no proof.
    """
    if None in proofs:
        return None
    generators = {p.generator for p in proofs if p is not None} - {None}
    return Symmetric(next(iter(generators), None)) if len(generators) < 2 else Symmetric(node)


def commute(a: Symmetric | None, b: Symmetric | None) -> bool:
    """Whether both matrices are symmetric and commute."""
    if a is None or b is None:
        return False
    return a.generator is None or b.generator is None or a.generator is b.generator


def product_proof(node: fx.Node, product: Product, known: SymmetricValues) -> Symmetric | None:
    """Prove that left @ right, without the addend, is symmetric. None if no rule applies."""
    (left, left_flipped), (right, right_flipped) = map(root, product.pair)
    a, b = known.get(left), known.get(right)
    if commute(a, b):
        return together(node, [a, b])
    transposes = left is right and left_flipped != right_flipped
    return Symmetric(node) if transposes or congruent(product, known) else None


def congruent(product: Product, known: SymmetricValues) -> bool:
    """Whether a product is (P S) P^T or P (S P^T), with S symmetric or diagonal."""
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
    """Whether q is the transpose of p."""
    (a, a_flipped), (b, b_flipped) = root(p), root(q)
    return a is b and (a_flipped != b_flipped or a in known)


def columns_scaled(node: fx.Node, by_column: bool) -> list[fx.Node]:
    """Read an elementwise product as a matrix whose columns or rows are scaled."""
    if node.target is not aten.mul.Tensor:
        return []
    broadcast = -2 if by_column else -1  # w has size 1 in this dim
    found = []
    for v, w in (node.args[:2], node.args[1::-1]):
        if isinstance(v, fx.Node) and isinstance(w, fx.Node) and shape_of(v) == shape_of(node):
            own = (1, 1, *shape_of(w))
            if tensor_value(w) is not None and own[broadcast] == 1:
                found.append(v)
    return found


def elementwise(node: fx.Node, known: SymmetricValues) -> Symmetric | None:
    """Prove that an elementwise function of symmetric matrices is symmetric. None if that does not follow.

    Other operands may have one number per matrix. Scaling and casts between floating dtypes keep the generator. Other
    functions lose it, because their result is no polynomial of it.
    """
    random = is_operator(node.target) and torch.Tag.nondeterministic_seeded in node.target.tags
    if not pointwise(node) or random or node.target in UNRELATED:
        return None
    tensors = [n for n in node.all_input_nodes if tensor_value(n) is not None]
    matrices = [n for n in tensors if not single(n)]
    if not matrices or not all(n in known and shape_of(n) == shape_of(node) for n in matrices):
        return None
    scaling = node.target in (aten.mul.Tensor, aten.div.Tensor) and len(tensors) == 2 and len(matrices) == 1
    floats = all(v is not None and v.dtype.is_floating_point for v in map(tensor_value, (node, *matrices)))
    cast = node.target is aten._to_copy.default and floats
    over = node.target is aten.div.Tensor and node.args[0] not in matrices  # a number divided by each element
    return known[matrices[0]] if (scaling and not over) or cast else Symmetric(node)


def single(node: fx.Node) -> bool:
    """Whether a tensor has one number for all elements of a matrix."""
    shape = (1, 1, *shape_of(node))
    return shape[-1] == shape[-2] == 1
