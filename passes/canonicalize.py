"""Give every idiom one spelling, so that later passes have few cases to handle."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import fx

from canzona_compile.ir.fx_utils import drop_dead_code, is_operator, placeholders
from canzona_compile.ir.step import Form, Leaf, Role, Step, Template

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Canonicalize:
    """Simplify every template's graph without changing a bit.

    1. `.item()` of a hyperparameter that is a Python number becomes that number.
    2. Views that undo each other (a transpose of a transpose), detach and alias disappear.
    3. A square becomes a product, which has the same bits in every fragment.
    4. Of equal calls one remains. Calls and hyperparameters that nothing reads disappear.
    """

    name: ClassVar[str] = "canonicalize"
    requires: ClassVar[Form] = Form.CAPTURED
    ensures: ClassVar[Form] = Form.CAPTURED

    def __call__(self, step: Step) -> Step:
        return replace(step, templates=tuple(map(canonical, step.templates)))


def canonical(template: Template) -> Template:
    """The simplified template; the given one stays as it is."""
    graph = copy.deepcopy(template.graph)
    numbers = {leaf.name for leaf in template.inputs if leaf.role is Role.SCALAR and leaf.dtype is None}
    for node in list(graph.nodes):
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node):
            continue
        number = node.target is aten._local_scalar_dense.default and source.target in numbers
        if number or node.target in (aten.detach.default, aten.alias.default):
            node.replace_all_uses_with(source)
        elif node.target is aten.pow.Tensor_Scalar and node.args[1] == 2:
            node.target, node.args = aten.mul.Tensor, (source, source)
        elif node.target is aten.permute.default and source.target is aten.permute.default:
            undo(node, source)
    share_equal_nodes(graph)
    drop_dead_code(graph)
    used = [leaf for leaf, node in zip(template.inputs, placeholders(graph), strict=True) if keep(leaf, node)]
    for leaf, node in zip(template.inputs, placeholders(graph), strict=True):
        if leaf not in used:
            graph.erase_node(node)
    graph.lint()
    return replace(template, graph=graph, inputs=tuple(used))


def keep(leaf: Leaf, node: fx.Node) -> bool:
    """Does a leaf stay an input? Hyperparameters that nothing reads do not."""
    return bool(node.users) or leaf.role is not Role.SCALAR


def undo(node: fx.Node, source: fx.Node) -> None:
    """Replace a permutation of a permutation by its operand if together they are the identity."""
    inner: Any = source.args[1]
    outer: Any = node.args[1]
    ndim = len(inner)
    if [inner[i % ndim] % ndim for i in outer] == list(range(ndim)):
        operand = source.args[0]
        assert isinstance(operand, fx.Node)
        node.replace_all_uses_with(operand)


def share_equal_nodes(graph: fx.Graph) -> None:
    """Eliminate common subexpressions, in place: captured graphs are functional, so equal calls give equal values."""
    seen: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or not repeatable(node.target):
            continue
        key = (node.target, repr(node.args), repr(sorted(node.kwargs.items(), key=lambda kv: kv[0])))
        first = seen.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)


def repeatable(target: Any) -> bool:
    """Does an equal call give an equal value? True for arithmetic on numbers and all operators but random ones."""
    if is_operator(target):
        return torch.Tag.nondeterministic_seeded not in target.tags
    return getattr(target, "__module__", "") == "_operator"
