"""Make the template of a stack of matrices from that of one matrix: each of them is stepped as if it were alone.

The graph stays as long as it is for one matrix, however many there are. An operator runs on the stack where it gives
each matrix the bits that it gives it alone, and is called for one matrix after the other elsewhere.
"""

from __future__ import annotations

import math
import operator
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from canzona_compile.capture.batch_dim import VIEWS
from canzona_compile.compat.torch_private import pytree
from canzona_compile.ir.bit_exactness import placed_equally
from canzona_compile.ir.fx_utils import insert_call, is_operator, outputs, pointwise, tensor_value
from canzona_compile.ir.layout import WHOLE_VECTORS, Shape
from canzona_compile.ir.program_ops import EachMatrix
from canzona_compile.ir.step import Leaf, Role, Template
from canzona_compile.lowering.batch_graph import REDUCTIONS, STACKED_PRODUCTS, product, reduced
from canzona_compile.lowering.stacking import stackable
from canzona_compile.machine.hardware import Machine
from canzona_compile.replica.raised import Untraceable

aten = torch.ops.aten


def stacked_template(
    template: Template, lead: Shape, names: frozenset[str], machine: Machine, exact: bool, suffix: str = ""
) -> Template:
    """Lift the template of one matrix.

    Args:
        lead: the dims that count matrices.
        names: the leaves of the state that have a value per matrix; the stack shares the others.
        suffix: of the names of the result.
    """
    names = names | {"param", "grad"}
    dims = "x".join(map(str, template.shape))

    def name(given: str) -> str:
        return given.replace(f"_{dims}_", f"_{'x'.join(map(str, (*lead, dims)))}_", 1) + suffix

    return replace(
        template,
        name=name(template.name),
        family=name(template.family) if template.family else "",
        shape=(*lead, *template.shape),
        inputs=tuple(stacked_leaf(leaf, lead) if leaf.name in names else leaf for leaf in template.inputs),
        state=tuple(stacked_leaf(leaf, lead) if leaf.name in names else leaf for leaf in template.state),
        graph=StackLift(template, lead, names, machine, exact).graph,
        batch_dims=len(lead),
    )


def stacked_leaf(leaf: Leaf, lead: Shape) -> Leaf:
    """The leaf of a stack, whose matrices lie one after the other, each as it lies alone."""
    stride = None
    if leaf.stride:
        steps = [math.prod((*lead[i + 1 :], *leaf.shape)) for i in range(len(lead))]
        stride = (*steps, *leaf.stride)
    return replace(leaf, shape=(*lead, *leaf.shape), stride=stride)


class StackLift:
    """Lifts the graph of a template, node by node.

    Args:
        names: the leaves that have a value per matrix.
    """

    def __init__(self, template: Template, lead: Shape, names: frozenset[str], machine: Machine, exact: bool) -> None:
        self.graph = fx.Graph()
        self.lead, self.dims, self.machine, self.exact = lead, len(lead), machine, exact
        self._env: dict[fx.Node, fx.Node] = {}
        self._many: set[fx.Node] = set()  # the nodes with a value per matrix
        leaves = {leaf.name: leaf for leaf in template.inputs}
        for node in template.graph.nodes:
            if node.op == "placeholder":
                self._placeholder(node, leaves[str(node.target)], str(node.target) in names)
            elif node.op == "call_function" and self._many.isdisjoint(node.all_input_nodes):
                self._env[node] = self.graph.node_copy(node, self._env.__getitem__)
            elif node.op == "call_function":
                self._env[node] = self._call(node)
                self._many.add(node)
        results = outputs(template.graph)
        self.graph.output(tuple(self._env[node] if isinstance(node, fx.Node) else node for node in results))

    def _placeholder(self, node: fx.Node, leaf: Leaf, many: bool) -> None:
        own = self._env[node] = self.graph.placeholder(leaf.name)
        own.meta = dict(node.meta)
        if many and leaf.role is not Role.SCALAR:
            whole = stacked_leaf(leaf, self.lead)
            strides = whole.stride or torch.empty(whole.shape, device="meta").stride()
            own.meta["val"] = node.meta["val"].new_empty_strided(whole.shape, strides)
            self._many.add(node)

    def _call(self, node: fx.Node) -> fx.Node:
        """Call the operator of a node on the stack if it can, or for each matrix of it."""
        target: Any = node.target
        args: Any = fx.map_arg(node.args, self._env.__getitem__)
        kwargs: Any = fx.map_arg(node.kwargs, self._env.__getitem__)
        if target is operator.getitem:
            return insert_call(self.graph, target, args, kwargs, name=node.name)
        if (view := self._view(node, args)) is not None:
            return view
        if pointwise(node) and self._fits(node):
            return self._pointwise(node)
        if not pointwise(node) and self._runs_on_stacks(node):
            if target in REDUCTIONS:
                args, kwargs = args[:1], reduced(node)
            return insert_call(self.graph, STACKED_PRODUCTS.get(target, target), args, kwargs)
        if is_operator(target) and target.is_view and not pointwise(node):  # a stack of its results would lie otherwise
            raise Untraceable(f"{target} makes views of matrices that no view of a stack is known for")
        own = {self._env[n] for n in self._many}
        leaves = pytree.tree_leaves((args, kwargs))
        stacked = frozenset(i for i, leaf in enumerate(leaves) if isinstance(leaf, fx.Node) and leaf in own)
        return insert_call(self.graph, EachMatrix(target, stacked, self.dims), args, kwargs, name=node.name)

    def _view(self, node: fx.Node, args: Any) -> fx.Node | None:
        """The same view of each matrix, as a view of the stack; None if it is none that is known here."""
        value, first = tensor_value(node), tensor_value(node.all_input_nodes[0])
        if value is None or first is None:
            return None
        if (order := turning(node, first.ndim)) is not None:
            order = [*range(self.dims), *(d + self.dims for d in order)]
            return insert_call(self.graph, aten.permute.default, (args[0], order))
        if node.target is aten.unsqueeze.default:
            at = args[1] + (self.dims if args[1] >= 0 else 0)
            return insert_call(self.graph, aten.unsqueeze.default, (args[0], at))
        if node.target in VIEWS and args[0].meta["val"].is_contiguous():
            return insert_call(self.graph, aten.view.default, (args[0], [*self.lead, *value.shape]))
        return None

    def _fits(self, node: fx.Node) -> bool:
        """Whether a pointwise operator gives each matrix of the stack the bits that it gives it alone.

        A 0-d operand never widens the dtype of the result, but a stack `[n, 1, 1]` of such operands may. Nor does one
        that all matrices share, beside a stack `[n]` of others.
        """
        value = tensor_value(node)
        if value is None:
            return False
        operands = [(n, v) for n in node.all_input_nodes if (v := tensor_value(n)) is not None]
        scalars = [v for n, v in operands if not v.ndim and (n in self._many or not value.ndim)]
        same = all(v.dtype == value.dtype for v in scalars) or node.target is aten._to_copy.default
        aligned = value.numel() % WHOLE_VECTORS == 0
        return same and (not self.exact or placed_equally(node, self.machine, aligned))

    def _pointwise(self, node: fx.Node) -> fx.Node:
        """Call a pointwise operator; operands of fewer dims are spread over those of each matrix."""
        level = max(v.ndim for n in (node, *node.all_input_nodes) if (v := tensor_value(n)) is not None)

        def operand(n: fx.Node) -> fx.Node:
            own, value = self._env[n], tensor_value(n)
            for _ in range(level - value.ndim if n in self._many and value is not None else 0):
                own = insert_call(self.graph, aten.unsqueeze.default, (own, self.dims))
            return own

        args: Any = fx.map_arg(node.args, operand)
        kwargs: Any = fx.map_arg(node.kwargs, operand)
        target: Any = node.target
        return insert_call(self.graph, target, args, kwargs)

    def _runs_on_stacks(self, node: fx.Node) -> bool:
        """Whether an operator that is not pointwise runs on the stack. On CUDA products do, up to rounding."""
        tensors = [n for n in node.all_input_nodes if tensor_value(n) is not None]
        if self.dims > 1 or not self._many.issuperset(tensors):
            return False
        exact = self.exact and not (product(node) and self.machine.device == "cuda")
        return stackable(node, self.machine, exact)


def turning(node: fx.Node, ndim: int) -> list[int] | None:
    """The order in which a transposing operator puts the dims of its operand; None for other operators."""
    args: Any = node.args
    order = list(range(ndim))
    if node.target is aten.t.default:
        return order[::-1]
    if node.target is aten.permute.default:
        return [d % ndim for d in args[1]]
    if node.target is aten.transpose.int:
        a, b = args[1], args[2]
        order[a], order[b] = order[b], order[a]
        return order
    return None
