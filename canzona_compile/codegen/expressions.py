"""Translate pointwise FX graphs to Triton, one line per operator, with the dtypes that ATen gave the values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from canzona_compile.codegen.rules import RULES
from canzona_compile.codegen.values import (
    Assignment,
    Builder,
    LoadValue,
    ScalarValue,
    Spread,
    Unsupported,
    check,
    converted,
)
from canzona_compile.ir.fx_utils import ancestors, is_operator, outputs, tensor_value
from canzona_compile.ir.layout import Shape


@dataclass(frozen=True, slots=True)
class Expressions:
    """A pointwise graph in Triton.

    Attributes:
        loads: the tensors that the graph reads, under the names of their nodes.
        results: for every result, the name of its value and the dtype to which it is rounded.
    """

    loads: tuple[LoadValue, ...]
    numbers: tuple[ScalarValue, ...]
    lines: tuple[Assignment, ...]
    results: tuple[tuple[str, torch.dtype], ...]


def copying(source: torch.dtype, target: torch.dtype) -> Expressions:
    """The expressions that copy a tensor and cast it from dtype `source` to dtype `target`."""
    for dtype in (source, target):
        check(dtype)
    lines = () if source == target else (Assignment("result", converted("{value}", source, target)),)
    return Expressions(
        (LoadValue("value", source, Spread.FULL),), (), lines, ((lines[0].name if lines else "value", target),)
    )


def expressions(graph: fx.Graph, wanted: Sequence[int], shape: Shape) -> Expressions:
    """Translate some results of a pointwise graph, and all nodes that they need, to Triton.

    Args:
        graph: a graph whose values have the shape `shape` or broadcast to it.
        shape: the shape of the whole matrix.
    """
    found = outputs(graph)
    builder = Builder(shape)
    results = []
    for i in wanted:
        node = found[i]
        value = tensor_value(node) if isinstance(node, fx.Node) else None
        if value is None:
            raise Unsupported(f"result {i} is not a tensor")
        if tuple(value.shape) != shape:
            raise Unsupported(f"result {node} has another shape than its matrix")
        results.append((node, value.dtype))
    needed = ancestors(node for node, _ in results)
    for node in graph.nodes:
        if node in needed:
            add(builder, node)
    return Expressions(
        tuple(builder.loads),
        tuple(builder.numbers.values()),
        tuple(builder.lines),
        tuple((node.name, dtype) for node, dtype in results),
    )


def add(builder: Builder, node: fx.Node) -> None:
    """Add the line of a node to `builder`. A number has no line, because the host computes it."""
    value = tensor_value(node)
    if value is None:
        return
    check(value.dtype)
    if node.op == "placeholder":
        builder.loads.append(LoadValue(node.name, value.dtype, builder.spread(tuple(value.shape))))
        return
    target = node.target
    rule = RULES.get(target.overloadpacket) if is_operator(target) else None
    if rule is None:
        raise Unsupported(f"{target} has no Triton spelling")
    builder.lines.append(Assignment(node.name, rule(builder, node)))
