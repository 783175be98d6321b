"""Variants: the graphs of a step, one per way through its code, as templates, and from which step on they repeat.

Recorders are asked with the inputs of a step, and answer with its variant.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from canzona_compile.ir.fx_utils import insert_call, outputs, placeholders, tensor_value
from canzona_compile.ir.step import Leaf, Role, Template
from canzona_compile.replica.external_counters import Counts
from canzona_compile.replica.parameter_spec import ParameterSpec
from canzona_compile.replica.raised import Untraceable

Scalars = dict[str, Any]
Source = tuple[str, ...]  # ("param",), ("grad",), ("state", leaf) or ("scalar", name)


class StepInputs(NamedTuple):
    """What the optimizer's code sees on a step of one parameter besides the parameter and its gradient.

    Attributes:
        leaves: of the state; those that are not tensors, unless a twin is to hold the others again.
        elsewhere: the numbers that the optimizer keeps outside of parameter groups and of the state of parameters.
    """

    group: Mapping[str, Any]
    leaves: Mapping[str, Any]
    elsewhere: Counts


@dataclass(frozen=True, eq=False, slots=True)
class Variant:
    """One captured graph of the step.

    Attributes:
        results: by source, the position of its new value in the output tuple. A source that the step does not write
            keeps its value. A state tensor that the step replaces without reading it appears here only.
        baked: by position of a scalar input, the value that the graph holds as a constant.
        precision: the float32 matmul precision that the step sets for its products; empty if it sets none.
    """

    graph: fx.Graph
    sources: tuple[Source, ...]
    results: dict[Source, int]
    baked: Mapping[int, float]
    precision: str = ""

    @classmethod
    def of(
        cls,
        graph: fx.Graph,
        sources: Sequence[Source],
        returned: int,
        baked: Mapping[int, float],
        precision: str = "",
    ) -> Variant:
        """Make the variant of a graph whose outputs are what it returns, and then the final values of its inputs."""
        results = {source: returned + i for i, source in enumerate(sources)}
        return cls(graph, tuple(sources), results, baked, precision)

    def same(self, other: Variant) -> bool:
        """Tell whether another trace found the same, as one does after a reset of Dynamo."""
        found = [(v.sources, v.results, v.baked, v.precision, str(v.graph)) for v in (self, other)]
        return found[0] == found[1]


# What a recorder found out about one step. Last is what the graph computes beside new values of its inputs, in order.
Answer = tuple[Variant, Scalars, tuple[Any, ...]]


class FormChange(Untraceable):
    """The step gives a tensor of its state other strides, so that later steps read a state of another form."""


# -- templates -----------------------------------------------------------------------------------------


def own_value(graph: fx.Graph, value: fx.Node) -> fx.Node:
    """Copy a value that lies in the memory of an input, because that input may be written before it is read."""
    origin = value
    while origin.op == "call_function" and getattr(origin.target, "is_view", False):
        assert isinstance(origin.args[0], fx.Node)
        origin = origin.args[0]
    if origin.op != "placeholder":
        return value
    return insert_call(graph, torch.ops.aten.clone.default, (value,))


def state_leaf(name: str, value: Tensor) -> Leaf:
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
            writes.append(source[1] if source[0] == "state" else source[0])
            values.append(own_value(graph, env[value]))
    graph.output(tuple(values))
    if all(leaf.role is not Role.GRAD for leaf in inputs):
        raise Untraceable("its step reads no gradient where a capture sees it, in another thread for example")
    return Template(name, spec.shape, spec.dtype, tuple(inputs), tuple(writes), graph, precision=variant.precision)


def leaf_of(node: fx.Node, source: Source) -> Leaf:
    """Describe what an input of a variant stands for."""
    value = tensor_value(node)
    match source[0]:
        case "param" | "grad":
            assert value is not None
            return Leaf(Role(source[0]), source[0], tuple(value.shape), value.dtype)
        case "state":
            assert value is not None
            return Leaf(Role.STATE, source[1], tuple(value.shape), value.dtype)
    if value is not None and value.dtype != torch.float64:
        return Leaf(Role.SCALAR, source[1], tuple(value.shape), value.dtype)
    return Leaf(Role.SCALAR, source[1])
