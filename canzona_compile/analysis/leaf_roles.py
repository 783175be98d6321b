"""What a step does with the elements of a leaf of the state: average gradients in it, divide by it, decompose it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx

from canzona_compile.analysis.flops import addend, decomposition
from canzona_compile.analysis.linear_algebra import COPIES, swaps
from canzona_compile.ir.fx_utils import outputs, placeholders, pointwise, tensor_value
from canzona_compile.ir.program_ops import operator_of
from canzona_compile.ir.step import Role, Template

aten = torch.ops.aten

# By operator, the position of what it divides by, or takes a root or a logarithm of.
DIVISORS = {
    aten.div.Tensor: 1,
    aten.div.Scalar: 1,
    aten.true_divide.Tensor: 1,
    aten.addcdiv.default: 2,
    aten.sqrt.default: 0,
    aten.rsqrt.default: 0,
    aten.reciprocal.default: 0,
    aten.log.default: 0,
    aten.pow.Tensor_Scalar: 0,
}


def divided_by(family: Sequence[Template], leaf: str) -> bool:
    """Does a variant of the step divide by elements of a leaf, take roots of them, or decompose it?

    Errors of the smallest elements count most there. Sums, such as the norm that Muon divides by, do not count.
    """
    return any(divides(node, found) for t in family for found in [carried(t, [leaf])] for node in t.graph.nodes)


def divides(node: fx.Node, elements: set[fx.Node]) -> bool:
    """Does a node divide by some of these values, take roots of them, or decompose them?"""
    if node.op != "call_function" or not any(own in elements for own in node.all_input_nodes):
        return False
    if decomposition(node):
        return True
    operator = operator_of(node)
    place = DIVISORS.get(operator)
    if operator is aten.pow.Tensor_Scalar and isinstance(power := node.args[1], int | float) and power >= 1:
        return False
    return place is not None and node.args[place] in elements


def averages(family: Sequence[Template], leaf: str) -> bool:
    """Is the new value of a leaf, wherever it is written, made of itself, the gradient and numbers by elements?"""
    written = False
    for template in family:
        new: dict[str, Any] = dict(zip(template.writes, outputs(template.graph), strict=True))
        if leaf not in new:
            continue
        roles = dict(zip(placeholders(template.graph), template.inputs, strict=True))
        sources = {n for n, own in roles.items() if own.name == leaf or own.role in (Role.GRAD, Role.SCALAR)}
        written = True
        if not isinstance(new[leaf], fx.Node) or not made_of(new[leaf], sources):
            return False
    return written


def made_of(node: fx.Node, sources: set[fx.Node]) -> bool:
    """Is a value made of some others by elements alone?"""
    waiting, seen = [node], set[fx.Node]()
    while waiting:
        own = waiting.pop()
        if own in seen or own in sources:
            continue
        seen.add(own)
        if own.op == "placeholder" or (tensor_value(own) is not None and own.all_input_nodes and not keeps(own)):
            return False
        waiting += own.all_input_nodes
    return True


def carried(template: Template, leaves: Iterable[str]) -> set[fx.Node]:
    """The values that consist of elements of some leaves, each changed by itself."""
    names = set(leaves)
    nodes = zip(placeholders(template.graph), template.inputs, strict=True)
    found = {node for node, leaf in nodes if leaf.name in names}
    for node in template.graph.nodes:
        if node.op != "call_function":
            continue
        if addend(node) in found or (keeps(node) and any(own in found for own in node.all_input_nodes)):
            found.add(node)
    return found


def keeps(node: fx.Node) -> bool:
    """Does a node work on elements, or move them, and add nothing up?"""
    return pointwise(node) or node.target in COPIES or swaps(node)
