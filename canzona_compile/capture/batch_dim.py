"""Prove that the first dimension of a stack is a batch dimension: entry e of a result depends only on entries e.

If it is, experts on different ranks are independent matrices, and nothing needs to be communicated. The proof follows
the dimension through the graph with a few rules. It fails at an operator that has no rule.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from canzona_compile.compat.torch_private import OpOverload
from canzona_compile.ir.fx_utils import outputs, placeholders, pointwise, tensor_value
from canzona_compile.ir.step import Template

aten = torch.ops.aten

REDUCTIONS = frozenset(
    {aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default, aten.linalg_vector_norm.default}
)
# These keep the elements in their order. `@` on stacks is captured as expand, view, bmm and _unsafe_view.
VIEWS = frozenset({aten.view.default, aten._unsafe_view.default, aten.reshape.default})
# Of these every entry is equal, so ranks with other numbers of entries make the same.
UNIFORM = frozenset({aten.full.default, aten.zeros.default, aten.ones.default})


def first_dim_is_batch(template: Template) -> bool:
    """Tell whether entry e of every leaf that a template writes depends only on entries e of its inputs."""
    if template.interpreted:
        return False
    batch: dict[fx.Node, int | None] = {}  # the batch dim of every value, None if it has none
    for node, leaf in zip(placeholders(template.graph), template.inputs, strict=True):
        batch[node] = 0 if leaf.shape and leaf.shape[0] == template.shape[0] else None
        if leaf.shape and batch[node] is None:
            return False
    for node in template.graph.nodes:
        if node.op != "call_function":
            continue
        carriers = [n for n in node.all_input_nodes if batch.get(n) is not None]
        if not carriers:
            batch[node] = None
            continue
        place = follow(node, batch)
        if place is None:
            return False
        batch[node] = place
    return all(isinstance(n, fx.Node) and batch[n] == 0 for n in outputs(template.graph))


def follow(node: fx.Node, batch: dict[fx.Node, int | None]) -> int | None:
    """Find the batch dimension of a node's result.

    Args:
        batch: the batch dimension of every earlier value; None for a value that has none.

    Returns:
        The index of the dimension; None if the node mixes entries or has no rule.
    """
    value = tensor_value(node)
    if value is None:
        return None
    target = node.target
    operands = [n for n in node.all_input_nodes if tensor_value(n) is not None]
    dims = [(batch[n], tensor_value(n).ndim) for n in operands]  # type: ignore[union-attr]
    if pointwise(node):
        from_right = {place - ndim for place, ndim in dims if place is not None}
        if len(from_right) != 1:
            return None
        at = from_right.pop()
        same = all(place is not None or equal_along(n, at) for n, (place, _) in zip(operands, dims, strict=True))
        return value.ndim + at if same else None
    place, ndim = dims[0]
    if target in (aten.bmm.default, aten.baddbmm.default):
        return 0 if all(p == 0 for p, _ in dims) else None
    if place is None:
        return None
    if target is aten.permute.default:
        return [d % ndim for d in node.args[1]].index(place)  # type: ignore[union-attr,operator]
    if target is aten.transpose.int:
        a, b = (int(d) % ndim for d in node.args[1:3])  # type: ignore[arg-type]
        return {a: b, b: a}.get(place, place)
    if target is aten.unsqueeze.default:
        at = int(node.args[1]) % (ndim + 1)  # type: ignore[arg-type]
        return place + (at <= place)
    before = tensor_value(operands[0])
    assert before is not None
    if target is aten.expand.default:
        there = place + value.ndim - ndim
        return there if value.shape[there] == before.shape[place] else None
    if target in VIEWS:
        return viewed(tuple(before.shape), place, tuple(value.shape))
    if target in REDUCTIONS:
        return reduced(node, place, ndim)
    return None


def equal_along(node: fx.Node, dim: int) -> bool:
    """Tell whether all entries of a value without batch dimension are equal along a dim, counted from the right."""
    value = tensor_value(node)
    assert value is not None
    return value.ndim < -dim or value.shape[dim] == 1 or node.target in UNIFORM


def viewed(before: Sequence[int], place: int, after: Sequence[int]) -> int | None:
    """Find the batch dimension of a view.

    Args:
        before: the shape of its operand.
        after: the shape of the view.

    Returns:
        The index of the dimension with as many entries, and as many elements between one and the next; None if the
        view has no such dimension, as it splits the batch dimension or merges it with another.
    """
    if 0 in before:
        return None
    for i, size in enumerate(after):
        if size == before[place] and math.prod(after[:i]) == math.prod(before[:place]):
            return i
    return None


def reduced(node: fx.Node, place: int, ndim: int) -> int | None:
    """Find the batch dimension of the result of a reduction.

    Returns:
        The index of the dimension in the result; None if the reduction covers it.
    """
    arguments: dict[str, Any] = dict(node.kwargs)
    assert isinstance(node.target, OpOverload)
    names = [a.name for a in node.target._schema.arguments]
    arguments.update(zip(names, node.args, strict=False))
    given = arguments.get("dim")
    if not given:
        return None
    over = {int(d) % ndim for d in (given if isinstance(given, list | tuple) else [given])}
    if place in over:
        return None
    return place if arguments.get("keepdim") else place - sum(d < place for d in over)
