"""Templates of captured variants: their inputs are named leaves, their outputs the leaves that the step writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from canzona_compile.capture.variant import ParameterSpec, Untraceable, Variant
from canzona_compile.ir.fx_utils import insert_call, outputs, placeholders, tensor_value
from canzona_compile.ir.step import Leaf, Role, Template


def own_value(graph: fx.Graph, value: fx.Node) -> fx.Node:
    """Copy a value that lies in the memory of an input, because that input may be written before it is read."""
    origin = value
    while origin.op == "call_function" and getattr(origin.target, "is_view", False):
        assert isinstance(origin.args[0], fx.Node)
        origin = origin.args[0]
    if origin.op != "placeholder":
        return value
    return insert_call(graph, torch.ops.aten.clone.default, (value,))


def state_leaf(name: str, value: torch.Tensor) -> Leaf:
    """Describe a tensor of a state."""
    stride = None if value.is_contiguous() else tuple(value.stride())
    return Leaf(Role.STATE, name, tuple(value.shape), value.dtype, stride)


def template_of(variant: Variant, name: str, spec: ParameterSpec) -> Template:
    """Make the template of a variant. Its inputs are named leaves; its outputs are the leaves that it writes."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    inputs: list[Leaf] = []
    for node, source in zip(placeholders(variant.graph), variant.sources, strict=True):
        leaf = leaf_of(node, source)
        used = bool(node.users.keys() - {n for n in variant.graph.nodes if n.op == "output"})
        if leaf.role in (Role.SCALAR,) and not used:
            continue
        env[node] = graph.placeholder(leaf.name)
        # A hyperparameter is a number from here on; its record is of the 0-d tensor that stood for it in tracing.
        env[node].meta = dict(node.meta) if leaf.dtype is not None else {}
        inputs.append(leaf)
    for node in variant.graph.nodes:
        if node.op == "call_function" and node.target is not torch.ops.aten.copy_.default:
            env[node] = graph.node_copy(node, lambda n: env[n])
    returned = outputs(variant.graph)
    sources = dict(zip(variant.sources, placeholders(variant.graph), strict=True))
    writes: list[str] = []
    values: list[fx.Node] = []
    for source, place in variant.results.items():
        value = returned[place]
        if source[0] in ("param", "state") and value is not sources.get(source):
            writes.append(source[2] if source[0] == "state" else source[0])
            values.append(own_value(graph, env[value]))
    graph.output(tuple(values))
    if all(leaf.role is not Role.GRAD for leaf in inputs):
        raise Untraceable("its step reads no gradient where a capture sees it, in another thread for example")
    return Template(name, spec.shape, spec.dtype, tuple(inputs), tuple(writes), graph, precision=variant.precision)


def leaf_of(node: fx.Node, source: Sequence[Any]) -> Leaf:
    """Describe what an input of a variant stands for."""
    value = tensor_value(node)
    match source[0]:
        case "param" | "grad":
            assert value is not None
            return Leaf(Role(source[0]), source[0], tuple(value.shape), value.dtype)
        case "state":
            assert value is not None
            return Leaf(Role.STATE, source[2], tuple(value.shape), value.dtype)
    if value is not None and value.dtype != torch.float64:
        return Leaf(Role.SCALAR, source[1], tuple(value.shape), value.dtype)
    return Leaf(Role.SCALAR, source[1])
