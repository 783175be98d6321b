"""Write recorded calls as a graph, in order and with their writes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from canzona_compile.capture.recording import RecordedCall, is_constant, number_in
from canzona_compile.capture.variant import Untraceable


class RecordedGraph:
    """A graph that grows by recorded calls.

    Args:
        foreign: why calls cannot be written that read a tensor which is neither an input nor computed by calls before.

    Attributes:
        graph: the graph.
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
        """Return the node that gives a tensor.

        Raises:
            Untraceable: there is none.
        """
        if id(tensor) not in self._nodes:
            raise Untraceable(self._foreign)
        return self._nodes[id(tensor)]

    def knows(self, tensor: Tensor) -> bool:
        """Tell whether a node gives a tensor."""
        return id(tensor) in self._nodes

    def call(self, call: RecordedCall, numbers: Mapping[int, fx.Node]) -> None:
        """Write a call.

        Args:
            call: the call.
            numbers: nodes for some of its numbers, by place among these. Others are constants.

        Raises:
            Untraceable: it reads a tensor that has no node.
        """
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

    def put(self, tensor: Tensor, value: fx.Node) -> None:
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
