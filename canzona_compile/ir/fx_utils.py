"""Working with FX graphs: what a node stands for, which nodes depend on which, and how a pass changes a graph.

Graphs are functional graphs over ATen operators. FX records the value of a node in `node.meta["val"]`: a fake tensor
(or one on the meta device) with the shape, dtype, device and strides of the operator's result, a symbolic number, or a
tuple of these. Passes decide by these records, so a pass that inserts a call has to record its value as well:
`insert_call` runs the operator on the fake tensors of its operands, and the record is torch's own.

Two kinds of nodes have no operator to run. A placeholder has the record of what it stands for, which is copied with it.
The nodes of rank programs stand for lists of tensors, one per task, and have no record.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import fx

from canzona_compile.compat.torch_private import FakeTensor, OpOverload
from canzona_compile.errors import InvalidStep
from canzona_compile.ir.compiled_call import CompiledCall

aten = torch.ops.aten

# Casts and copies change no layout and work element by element, but carry no pointwise tag.
POINTWISE_COPIES = frozenset(
    {
        aten._to_copy.default,
        aten.clone.default,
        aten.copy.default,
        aten.detach.default,
        aten.alias.default,
        aten.zeros_like.default,
        aten.ones_like.default,
        aten.full_like.default,
        aten.empty_like.default,
    }
)

# -- what a node stands for --------------------------------------------------------------------


def tensor_value(node: fx.Node) -> torch.Tensor | None:
    """The fake tensor that a node stands for, None for numbers and structure."""
    value = node.meta.get("val")
    return value if isinstance(value, torch.Tensor) else None


def is_number(value: Any) -> bool:
    """Whether an operand is a number: anything but a node that stands for a tensor."""
    return not (isinstance(value, fx.Node) and tensor_value(value) is not None)


def placeholders(graph: fx.Graph) -> tuple[fx.Node, ...]:
    """The inputs of a graph, in order."""
    return tuple(n for n in graph.nodes if n.op == "placeholder")


def outputs(graph: fx.Graph) -> tuple[Any, ...]:
    """What a graph returns, as a tuple of nodes and constants."""
    returned = next(n for n in reversed(graph.nodes) if n.op == "output").args[0]
    return tuple(returned) if isinstance(returned, list | tuple) else (returned,)


def is_operator(target: Any) -> TypeGuard[OpOverload]:
    """Whether the target of a node is an operator of torch."""
    return isinstance(target, OpOverload)


def pointwise(node: fx.Node) -> bool:
    """Whether element i of the result depends only on the elements i of the operands."""
    target = node.target
    if not isinstance(target, OpOverload):
        return False
    # prims.fma is pointwise but untagged; torch registers it only once a compiler has been imported.
    return target in POINTWISE_COPIES or torch.Tag.pointwise in target.tags or target.name() == "prims::fma"


def casts(node: Any) -> bool:
    """Whether an operand is a cast to another dtype and nothing else."""
    return isinstance(node, fx.Node) and node.target is aten._to_copy.default and set(node.kwargs) == {"dtype"}


# -- which nodes depend on which ---------------------------------------------------------------


def ancestors(nodes: Iterable[fx.Node], stop: Collection[fx.Node] = ()) -> set[fx.Node]:
    """The nodes and everything that they are made of."""
    found: set[fx.Node] = set()
    todo = [n for n in nodes if n not in stop]
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += [n for n in node.all_input_nodes if n not in stop]
    return found


def descendants(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """All nodes that depend on the given nodes. A given node is included only if it depends on another given one."""
    found: set[fx.Node] = set()
    todo = list(nodes)
    while todo:
        for user in todo.pop().users:
            if user not in found:
                found.add(user)
                todo.append(user)
    return found


def from_numbers(graph: fx.Graph, barred: Collection[str] = ()) -> set[fx.Node]:
    """Numbers and 0-d tensors that are made of numbers and of 0-d placeholders alone."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        value = tensor_value(node)
        small = node.op != "output" and (value is None or value.ndim == 0)
        # Users' functions run once, on the owner, and so do optimizer objects of one matrix.
        if isinstance(node.target, CompiledCall) or node.meta.get("on_owner"):
            continue
        inputs_free = node.target not in barred if node.op == "placeholder" else found.issuperset(node.all_input_nodes)
        if small and inputs_free:
            found.add(node)
    return found


# -- parts of graphs -----------------------------------------------------------------------------


def subgraph(graph: fx.Graph, inputs: Sequence[fx.Node], results: Sequence[Any]) -> fx.Graph:
    """Copy the part of a graph that computes some of its values.

    Args:
        inputs: nodes that the part does not compute but takes, as its first placeholders, named like the nodes.

    Returns:
        A graph whose placeholders are `inputs` and then the placeholders of `graph` that it reads.
    """
    part = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}

    def placeholder(node: fx.Node, name: str) -> None:
        env[node] = part.placeholder(name)
        env[node].meta = dict(node.meta)

    for node in inputs:
        placeholder(node, node.name)
    wanted = ancestors([n for n in results if isinstance(n, fx.Node)], stop=set(inputs))
    for node in graph.nodes:
        if node not in wanted:
            continue
        if node.op == "placeholder":
            placeholder(node, str(node.target))
        else:
            env[node] = part.node_copy(node, env.__getitem__)
    part.output(tuple(env[n] if isinstance(n, fx.Node) else n for n in results))
    part.lint()
    return part


def graph_module(graph: fx.Graph, name: str) -> fx.GraphModule:
    """A copy of a graph as a module of class `name`, to print or to call."""
    return fx.GraphModule(torch.nn.Module(), copy.deepcopy(graph), class_name=name)


def drop_dead_code(graph: fx.Graph) -> fx.Graph:
    """Erase the calls whose values nothing reads, in place, and return the graph. Placeholders stay.

    By default torch keeps random operators and assertions about traced numbers. Steps that draw random numbers are not
    captured as graphs, and an assertion guards nothing once the number that it is about is gone.
    """
    graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
    return graph


# -- inserting calls -----------------------------------------------------------------------------


def insert_call(
    graph: fx.Graph,
    target: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    name: str | None = None,
) -> fx.Node:
    """Insert a call where the graph inserts, and record the value that a fake run of the operator gives.

    Args:
        graph: changed in place. Its insert point is set by `graph.inserting_before` and the like.
        args, kwargs: operands: nodes of this graph, numbers, dtypes, lists of such.
        name: of the node, which FX makes unique by a number at its end. If it is None, an operator gives its name
            without the overload, as in captured graphs (`mm_1` for `aten.mm.default`).

    Returns:
        The new node. `node.meta["val"]` has the shape, dtype, device and strides that the call will give.
    """
    if name is None and isinstance(target, OpOverload):
        name = target.overloadpacket.__name__
    arguments, options = tuple(args), dict(kwargs or {})
    value = fake_result(graph, target, arguments, options)
    node = graph.create_node("call_function", target, arguments, options, name)
    node.meta["val"] = value
    return node


def cast(graph: fx.Graph, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    """Insert a cast if the node has another dtype."""
    if node.meta["val"].dtype == dtype:
        return node
    return insert_call(graph, aten._to_copy.default, (node,), {"dtype": dtype})


def fake_result(graph: fx.Graph, target: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What a call returns, without computing it: fake tensors, numbers or tuples of these.

    The operator runs under the FakeTensorMode of its operands. Calls without tensors among their operands run under
    that of the graph. Graphs whose values are plain tensors on the meta device have no such mode and need none.
    """
    operands: list[fx.Node] = []
    fx.map_arg((args, kwargs), operands.append)
    mode = fake_mode(operands) or fake_mode(graph.nodes)
    values: Any = fx.map_arg((args, kwargs), recorded)
    try:
        with mode or contextlib.nullcontext(), torch.no_grad():
            return target(*values[0], **values[1])
    except Exception as error:
        names = ", ".join(f"%{n.name}" for n in operands)
        raise InvalidStep(f"{target} does not take its operands: {error}", at=names or str(target)) from error


def fake_mode(nodes: Iterable[fx.Node]) -> contextlib.AbstractContextManager[Any] | None:
    """The mode of the first fake tensor that is recorded for these nodes."""
    for node in nodes:
        value = node.meta.get("val")
        for own in value if isinstance(value, tuple | list) else (value,):
            if isinstance(own, FakeTensor):
                return own.fake_mode
    return None


def recorded(node: fx.Node) -> Any:
    """The value of an operand in a fake run; 1 stands for numbers, whose values are not known before the step runs.

    Hyperparameters are placeholders without a record. They are floats.
    """
    match value := node.meta.get("val", 1.0):
        case bool() | torch.SymBool():
            return True
        case torch.SymInt():
            return 1
        case float() | torch.SymFloat():
            return 1.0
    return value
