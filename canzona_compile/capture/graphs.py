"""Graphs of what was recorded: written as calls, in order and with their writes, and then without writes.

AOTAutograd would not do for the second: its tensorify pass turns `add(x, u, alpha=-lr)` back into a graph with lr as a
constant, so that a schedule would recompile every step. `make_fx` of a functionalized run keeps `.item()`
and the scalar arithmetic after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv

from canzona_compile.capture.dynamo import silent
from canzona_compile.capture.recording import RecordedCall, is_constant, number_in
from canzona_compile.compat.torch_private import FAKE_LOGGER, FakeTensorMode
from canzona_compile.ir.fx_utils import ancestors
from canzona_compile.replica.raised import Untraceable


class RecordedGraph:
    """A graph that grows by recorded calls.

    Args:
        foreign: why calls cannot be written that read a tensor which is neither an input nor computed by calls before.
    """

    def __init__(self, foreign: str) -> None:
        self.graph, self._foreign = fx.Graph(), foreign
        self._nodes: dict[int, fx.Node] = {}

    def input(self, name: str) -> fx.Node:
        """Add an input."""
        return self.graph.placeholder(name)

    def stands_for(self, node: fx.Node, tensor: Tensor) -> None:
        """Let a node give a tensor of the path, unless another one gives it already."""
        node.meta["val"] = node.meta["example_value"] = tensor
        self._nodes.setdefault(id(tensor), node)

    def node_of(self, tensor: Tensor) -> fx.Node:
        """Return the node that gives a tensor."""
        if id(tensor) not in self._nodes:
            raise Untraceable(self._foreign)
        return self._nodes[id(tensor)]

    def knows(self, tensor: Tensor) -> bool:
        """Tell whether a node gives a tensor."""
        return id(tensor) in self._nodes

    def call(self, call: RecordedCall, numbers: Mapping[int, fx.Node]) -> None:
        """Write a call."""
        if call.func is torch.ops.aten.lift_fresh.default and is_constant(call.leaves[0]):
            constant = call.leaves[0]
            number = numbers.get(0, number_in(constant))
            options = {"dtype": constant.dtype, "device": call.result.device}
            node = self.graph.call_function(torch.ops.aten.full.default, ([], number), options)
        else:
            at = -1

            def leaf_node(leaf: Any) -> Any:
                if at in call.numbers and (place := call.numbers.index(at)) in numbers:
                    return numbers[place]
                return self.node_of(leaf) if isinstance(leaf, Tensor) else leaf

            def argument(value: Any) -> Any:
                nonlocal at
                at += 1
                if not isinstance(value, list | tuple):
                    return leaf_node(value)
                entries = []
                for entry in value:
                    at += 1
                    entries.append(leaf_node(entry))
                return entries

            args = tuple(argument(value) for value in call.args)
            kwargs = {name: argument(value) for name, value in call.kwargs.items()}
            node = self.graph.call_function(call.func, args, kwargs)
        self._name_results(node, call.result)

    def write(self, tensor: Tensor, value: fx.Node) -> None:
        """Write a value into a tensor that has a node."""
        self.graph.call_function(torch.ops.aten.copy_.default, (self.node_of(tensor), value))

    def copy(self, tensor: Tensor) -> fx.Node:
        """Copy a tensor as it is now."""
        return self.graph.call_function(torch.ops.aten.clone.default, (self.node_of(tensor),))

    def _name_results(self, node: fx.Node, result: Any) -> None:
        """Remember which node gives which tensor. What writes to its operand gives that, which has a node."""
        if isinstance(result, Tensor):
            self.stands_for(node, result)
        elif isinstance(result, list | tuple):
            node.meta["val"] = tuple(result)
            for i, entry in enumerate(result):
                item = self.graph.call_function(lambda values, i: values[i], (node, i))
                self._name_results(item, entry)


def functional(
    gm: fx.GraphModule,
    static: Mapping[str, Tensor],
    inputs: Sequence[Any],
    values: Mapping[int, float],
    bake: Iterable[int] = (),
) -> tuple[fx.Graph, dict[int, float]]:
    """Trace a functional form of a graph.

    Args:
        values: the present values of the scalar placeholders (0-d float64 tensors), by position.

    Returns:
        A graph over placeholders [*static, *inputs], whose output is a flat tuple: the outputs of `gm`
        first, then the final value of every placeholder (itself if the graph does not write it). And the
        scalars that had to become constants because an operator's shape rule asks for their value
        (torch.addmm does for beta): the baked values by position.
    """
    baked = {i: values[i] for i in bake if i in values}
    while True:
        asked: set[int] = set()
        try:
            return _trace(gm, static, inputs, baked, asked), baked
        except GuardOnDataDependentSymNode:
            fresh = {i: values[i] for i in asked if i in values and i not in baked}
            if not fresh:
                raise
            baked |= fresh


def _trace(
    gm: fx.GraphModule,
    static: Mapping[str, Tensor],
    inputs: Sequence[Any],
    baked: Mapping[int, float],
    asked: set[int],
) -> fx.Graph:
    """Trace it; `asked` gets the scalar placeholders, by position, for whose value an operator asks."""
    names = list(static)
    position = {n: i for i, n in enumerate(n for n in gm.graph.nodes if n.op == "placeholder")}

    def scalars_behind(node: fx.Node) -> set[int]:
        """The scalar placeholders, by position, that the non-tensor operands of `node` depend on."""
        numbers = [n for n in node.all_input_nodes if not isinstance(n.meta.get("example_value"), Tensor)]
        return {position[n] for n in ancestors(numbers) if n in position}

    def run(attributes: list[Tensor], arguments: list[Any]) -> tuple[Any, ...]:
        attributes = list(attributes)

        class Inline(fx.Interpreter):
            def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
                return attributes[names.index(target)]

            def call_method(self, target: Any, args: Any, kwargs: Any) -> Any:
                if target in ("sub", "sub_") and "alpha" in kwargs:  # whose shape rule asks for alpha's value
                    return super().call_method(f"add{target[3:]}", args, {**kwargs, "alpha": -kwargs["alpha"]})
                return super().call_method(target, args, kwargs)

            def run_node(self, n: fx.Node) -> Any:
                if n.op == "call_method" and n.target == "item":
                    source = n.args[0]
                    if isinstance(source, fx.Node) and position.get(source) in baked:
                        return baked[position[source]]
                try:
                    return super().run_node(n)
                except GuardOnDataDependentSymNode:
                    asked.update(scalars_behind(n))
                    raise

        return (*Inline(gm).run(*arguments), *attributes, *arguments)

    def like(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        sizes, strides = tuple(map(int, value.shape)), tuple(map(int, value.stride()))
        return torch.empty_strided(sizes, strides, dtype=value.dtype, device=value.device)

    # Operators that ask for a value raise here, which torch would log as errors.
    fake = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    with fake, torch.no_grad(), silent(FAKE_LOGGER):
        traced = make_fx(functionalize(run, remove="mutations"), tracing_mode="real", _allow_non_fake_inputs=True)(
            [like(t) for t in static.values()], [like(v) for v in inputs]
        )
    return traced.graph
