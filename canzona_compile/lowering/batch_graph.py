"""Turn graphs for one matrix into graphs for n of them: every tensor [...] becomes a list of n, or a stack [n, ...]."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from canzona_compile.ir import program_ops
from canzona_compile.ir.bit_exactness import foreach_equal
from canzona_compile.ir.fx_utils import casts, drop_dead_code, is_operator, outputs, pointwise, tensor_value
from canzona_compile.ir.step import Stacked
from canzona_compile.kernels.ops import GEMM_AXPBY, SYM_GEMM

aten = torch.ops.aten

# On CPU, torch's foreach functions loop over these operators in C++. They give the same bits with less Python.
FOREACH: Mapping[Any, str] = {
    aten.mul.Tensor: "mul",
    aten.add.Tensor: "add",
    aten.sub.Tensor: "sub",
    aten.div.Tensor: "div",
    aten.lerp.Scalar: "lerp",
    aten.sqrt.default: "sqrt",
    aten.neg.default: "neg",
    aten.abs.default: "abs",
}


class Lifter:
    """Builds the lifted graph node by node. The new nodes stand for lists or stacks and have no record of a value.

    Args:
        stacked: names of placeholders that arrive as one tensor [n, ...]. Other tensors arrive as lists of n.
    """

    def __init__(
        self,
        stacked: Iterable[str],
        single: Iterable[str],
        stackable: Callable[[fx.Node], bool],
        foreach: bool,
        in_place: frozenset[fx.Node] = frozenset(),
    ) -> None:
        self.graph = fx.Graph()
        self.stackable, self.foreach, self.in_place = stackable, foreach, in_place
        self._stacked_names, self._single_names = set(stacked), set(single)
        self.lists: dict[fx.Node, fx.Node] = {}
        self.stacks: dict[fx.Node, fx.Node] = {}
        self.singles: dict[fx.Node, fx.Node] = {}

    def lift(self, graph: fx.Graph) -> None:
        """Lift all but the output node."""
        for node in graph.nodes:
            if node.op == "placeholder":
                home = self.lists
                if node.target in self._stacked_names:
                    home = self.stacks
                elif node.target in self._single_names:
                    home = self.singles
                home[node] = self.graph.placeholder(str(node.target))
            elif node.op == "call_function":
                self._call(node)

    def _call(self, node: fx.Node) -> None:
        operands = node.all_input_nodes
        if all(n in self.singles for n in operands):
            self.singles[node] = self.graph.node_copy(node, lambda n: self.singles[n])
        elif node.target is operator.getitem and operands[0] in self.stacks:
            self.stacks[node] = self.graph.call_function(operator.getitem, (self.stacks[operands[0]], node.args[1]))
        elif self.stackable(node) and (any(n in self.stacks for n in operands) or starts_stack(node)):
            self.stacks[node] = self._stacked_call(node)
        else:
            self.lists[node] = self._listed_call(node)

    def listed(self, node: fx.Node) -> fx.Node:
        """The value of a node as a list, or as it is if all tasks share it."""
        if node in self.singles:
            return self.singles[node]
        if node not in self.lists:
            self.lists[node] = self.graph.call_function(program_ops.unstack, (self.stacks[node],))
        return self.lists[node]

    def stack(self, node: fx.Node) -> fx.Node:
        """The value of a node as one tensor [n, ...]."""
        if node not in self.stacks:
            self.stacks[node] = self.graph.call_function(program_ops.stack, (self.lists[node],))
        return self.stacks[node]

    def _listed_call(self, node: fx.Node) -> fx.Node:
        target: Any = node.target
        args: Any = fx.map_arg(node.args, self.listed)
        kwargs: Any = fx.map_arg(node.kwargs, self.listed)
        overwrites = node in self.in_place
        usable = self.foreach and self._uniform(node) and foreach_equal(node, overwrites)
        name = FOREACH.get(target) if usable else None
        if overwrites:
            if name is not None:
                self.graph.call_function(getattr(torch, f"_foreach_{name}_"), args, kwargs)
            else:
                self.graph.call_function(program_ops.each, (in_place_variant(target), *args), kwargs)
            first: fx.Node = args[0]
            return first
        if name is not None:
            return self.graph.call_function(getattr(torch, f"_foreach_{name}"), args, kwargs)
        if target is operator.getitem:
            return self.graph.call_function(target, args, kwargs)
        if not is_operator(target):
            return self.graph.call_function(LoopOver(target), args, kwargs)
        return self.graph.call_function(program_ops.each, (target, *args), kwargs)

    def _uniform(self, node: fx.Node) -> bool:
        """Whether a foreach function takes the operands: first a list, and then lists or one number."""
        tensors = [n for n in node.all_input_nodes if tensor_value(n) is not None]
        lists = [n for n in node.all_input_nodes if n not in self.singles]
        return lists == tensors and node.args[0] in tensors

    def _stacked_call(self, node: fx.Node) -> fx.Node:
        ndim = max(v.ndim for n in [node, *node.all_input_nodes] if (v := tensor_value(n)) is not None)

        def operand(n: fx.Node) -> fx.Node:
            if n in self.singles:
                return self.singles[n]
            value = tensor_value(n)
            assert value is not None
            whole = self.stack(n)
            if pointwise(node) and value.ndim < ndim:
                return self.graph.call_function(program_ops.spread, (whole, ndim))
            return whole

        args: Any = fx.map_arg(node.args, operand)
        kwargs: Any = fx.map_arg(node.kwargs, operand)
        source: Any = node.target
        if source is aten.permute.default:
            args = (args[0], [0, *(d % ndim + 1 for d in args[1])])
        if source in REDUCTIONS:
            args, kwargs = args[:1], reduced(node)
        return self.graph.call_function(STACKED_PRODUCTS.get(source, source), args, kwargs)


@dataclass(frozen=True)
class LoopOver:
    """Target of a node in a lifted graph: `program_ops.each` of something that is no operator.

    FX writes operators among the arguments of a call by their names, and other objects not at all.
    """

    target: Any

    def __post_init__(self) -> None:
        object.__setattr__(self, "__name__", f"each_{self.target.__name__}")  # FX writes and prints it

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the target once per task."""
        return program_ops.each(self.target, *args, **kwargs)


STACKED_PRODUCTS: Mapping[Any, Any] = {
    aten.mm.default: aten.bmm.default,
    aten.addmm.default: aten.baddbmm.default,
    SYM_GEMM: SYM_GEMM,  # all dims before the last two are batch dims
    GEMM_AXPBY: GEMM_AXPBY,
}


# Operators that reduce some dims of a matrix, or all of them if `dim` is None: on a stack, the same dims of each entry.
REDUCTIONS = frozenset({aten.linalg_vector_norm.default, aten.sum.dim_IntList, aten.mean.dim})


def reduced(node: fx.Node) -> dict[str, Any]:
    """The arguments after the first one, by name, that reduce each entry of a stack as `node` reduces one entry."""
    value = tensor_value(node.all_input_nodes[0])
    assert value is not None
    ndim = value.ndim
    target: Any = node.target
    names = [argument.name for argument in target._schema.arguments]
    given = {**dict(zip(names[1:], node.args[1:], strict=False)), **node.kwargs}
    dims = given.get("dim")
    each = range(ndim) if dims is None or dims == [] else [dims] if isinstance(dims, int) else dims
    return {**given, "dim": [d % ndim - ndim for d in each]}


# Names, without `_` and `linalg_`, of operators that take [..., m, n] and therefore take stacks.
STACKED_AS_THEY_ARE = frozenset({"eigh", "qr", "cholesky_ex", "solve_triangular"})


def product(node: fx.Node) -> bool:
    """Whether a node is a matrix product for which there is an operator on stacks."""
    return node.target in STACKED_PRODUCTS


def factorization(node: fx.Node) -> str:
    """The name of a decomposition or solver that takes a stack of matrices in one call; empty for other nodes."""
    if not is_operator(node.target):
        return ""
    name = node.target.overloadpacket.__name__.removeprefix("_").removeprefix("linalg_")
    return name if name in STACKED_AS_THEY_ARE else ""


def starts_stack(node: fx.Node) -> bool:
    """Whether a node gains enough from a stack to stack its operands, which copies them."""
    return product(node) or node.target in STACKED_PRODUCTS.values() or bool(factorization(node))


def in_place_variant(target: Any) -> Any:
    """The in-place variant of an operator (aten.mul_.Tensor for aten.mul.Tensor); None if there is none."""
    if not is_operator(target):
        return None
    packet = getattr(aten, f"{target.overloadpacket.__name__}_", None)
    return getattr(packet, target._overloadname, None) if packet is not None else None


def lift_prepare(graph: fx.Graph, single: Iterable[str], *, foreach: bool, casting: int) -> fx.Graph:
    """Lift a prepare graph to lists.

    Args:
        casting: how many of the first results are only copied into buffers. The copy casts, so a cast that would
            compute such a result is left out.
    """
    lifter = Lifter((), single, lambda _: False, foreach)
    lifter.lift(graph)
    results = []
    for i, node in enumerate(outputs(graph)):
        if i < casting and casts(node):
            node = node.args[0]
        results.append(lifter.listed(node))
    lifter.graph.output(tuple(results))
    return drop_dead_code(lifter.graph)


def lift_stacked(
    graph: fx.Graph,
    stacked: Iterable[str],
    single: Iterable[str],
    stackable: Callable[[fx.Node], bool],
    *,
    foreach: bool,
) -> Stacked:
    """Lift a compute graph to stacks where `stackable` allows it, and to lists elsewhere.

    Args:
        stacked: names of placeholders that arrive as one tensor [n, ...].
    """
    names = tuple(stacked)
    lifter = Lifter(names, single, stackable, foreach)
    lifter.lift(graph)
    results = outputs(graph)
    whole = tuple(n in lifter.stacks for n in results)
    lifter.graph.output(tuple(lifter.stacks[n] if n in lifter.stacks else lifter.listed(n) for n in results))
    return Stacked(lifter.graph, names, whole)


def lift_apply(graph: fx.Graph, writes: Iterable[str], single: Iterable[str], *, foreach: bool) -> fx.Graph:
    """Lift an apply graph to lists. It writes its results into the leaves `writes` instead of returning them."""
    pairs = list(zip(writes, outputs(graph), strict=True))
    leaf = {str(n.target): n for n in graph.nodes if n.op == "placeholder"}
    in_place: set[fx.Node] = set()
    for name, node in pairs:
        in_place |= overwriting_chain(node, leaf.get(name), [n for _, n in pairs])
    lifter = Lifter((), single, lambda _: False, foreach, frozenset(in_place))
    lifter.lift(graph)
    for name, node in pairs:
        if node in in_place:
            continue
        target = lifter.lists[leaf[name]] if name in leaf else lifter.graph.placeholder(name)
        lifter.graph.call_function(program_ops.copy, (target, lifter.listed(node)))
    lifter.graph.output(())
    return lifter.graph


def overwriting_chain(node: Any, leaf: fx.Node | None, results: list[Any]) -> set[fx.Node]:
    """The nodes on the path from a leaf to `node`, if each of them may overwrite its first operand; else none."""
    chain: set[fx.Node] = set()
    current = node
    while current is not leaf:
        if not isinstance(current, fx.Node) or current.op != "call_function" or leaf is None:
            return set()
        source = current.args[0] if current.args else None
        value, kept = tensor_value(current), tensor_value(leaf)
        fits = (
            in_place_variant(current.target) is not None
            and pointwise(current)
            and isinstance(source, fx.Node)
            and len(source.users) == 1
            and current.all_input_nodes.count(source) == 1
            and sum(a is source for a in current.args) == 1
            and (source not in results)
            and value is not None
            and kept is not None
            and (value.dtype, value.shape) == (kept.dtype, kept.shape)
        )
        if not fits:
            return set()
        chain.add(current)
        current = source
    return chain
