"""Calls of compiled functions in a path: each becomes one node of the graph, in the place of what it calls as written.

The graph is traced with inputs in the place of what these calls return, and with outputs for what they are given.
Then the calls are put between the two. So functionalization, which follows writes and views, never meets a compiled
function, and needs to know nothing of it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from canzona_compile.capture.recorded_graph import RecordedGraph
from canzona_compile.capture.recording import CompiledEntry, CompiledExit, RecordedCall
from canzona_compile.capture.variant import Untraceable
from canzona_compile.compat.torch_private import pytree
from canzona_compile.ir.compiled_call import CompiledCall
from canzona_compile.ir.fx_utils import outputs, placeholders


@dataclass(eq=False, slots=True)
class CompiledPart:
    """The call of a compiled function in a path.

    Attributes:
        target: what the node of the graph calls.
        leaves: the leaves of its arguments.
        tensors: the distinct tensors among them.
        new: the tensors that it returns, as far as they are not among these.
        made: inputs of the graph that is traced, in the place of what the call gives.
        given: outputs of that graph, by the leaves that they are; leaves that are constants have none.
    """

    target: CompiledCall
    leaves: list[Any]
    tensors: list[Tensor]
    new: list[Tensor]
    made: list[fx.Node] = field(default_factory=list)
    given: dict[int, fx.Node] = field(default_factory=dict)

    @property
    def examples(self) -> list[Tensor]:
        """Tensors like those that the call gives."""
        return [*(self.tensors[i] for i in self.target.written), *self.new]

    def begin(self, graph: RecordedGraph, number: int) -> None:
        """Add the inputs that stand for what the call gives; `number` is its number in the path."""
        self.made = [graph.input(f"made_{number}_{i}") for i in range(len(self.examples))]
        for node, tensor in zip(self.made[len(self.target.written) :], self.new, strict=True):
            graph.stands_for(node, tensor)

    def write(self, graph: RecordedGraph, call: RecordedCall, numbers: Mapping[int, fx.Node]) -> None:
        """Write copies of what the call is given, and what it writes.

        Args:
            graph: the graph, with the calls before this one.
            call: the entry.
            numbers: nodes for some of its numbers, by place among these.
        """
        copies = {id(tensor): graph.copy(tensor) for tensor in self.tensors}
        self.given = {i: copies[id(leaf)] for i, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor)}
        self.given |= {call.numbers[place]: node for place, node in numbers.items()}
        for i, node in zip(self.target.written, self.made, strict=False):
            graph.put(self.tensors[i], node)


def own_calls(calls: Sequence[RecordedCall]) -> Iterator[int]:
    """Yield the indices of the calls that the step itself makes; those of compiled functions are left to these."""
    inside = False
    for index, call in enumerate(calls):
        if isinstance(call.func, CompiledExit):
            inside = False
        elif not inside:
            yield index
            inside = isinstance(call.func, CompiledEntry)


def part_at(calls: Sequence[RecordedCall], begin: int) -> CompiledPart:
    """Describe the call of a compiled function.

    Args:
        calls: the calls of a path.
        begin: the index of its entry.

    Raises:
        Untraceable: it takes no tensors, uses others than these, or returns a view.
    """
    entry = calls[begin]
    end = next(i for i in range(begin, len(calls)) if isinstance(calls[i].func, CompiledExit))
    inner, returned, name = calls[begin + 1 : end], calls[end].leaves, entry.func.called.name
    tensors = list({id(leaf): leaf for leaf in entry.leaves if isinstance(leaf, Tensor)}.values())
    which = {id(tensor): i for i, tensor in enumerate(tensors)}
    written = written_by(inner, tensors, name)
    new = fresh_results(returned, tensors, name)
    if not tensors:
        raise Untraceable(f"its step calls the compiled function {name}, which takes no tensors")
    target = CompiledCall(
        entry.func.called.function,
        name,
        entry.func.form,
        tuple(which.get(id(leaf)) for leaf in entry.leaves),
        written,
        frozenset(i for i, tensor in enumerate(tensors) if isinstance(tensor, torch.nn.Parameter)),
        frozenset(i for i, leaf in enumerate(entry.leaves) if type(leaf) is int),
        new,
        body_of(inner, tensors, [returned[i] for i in new], name),
    )
    return CompiledPart(target, entry.leaves, tensors, [returned[i] for i in new])


def written_by(calls: Sequence[RecordedCall], tensors: Sequence[Tensor], name: str) -> tuple[int, ...]:
    """Find which tensors some calls write; the others that they write they have made themselves, see `body_of`."""
    memory = {storage_of(tensor) for call in calls for tensor in operands_written(call)}
    written = tuple(i for i, tensor in enumerate(tensors) if storage_of(tensor) in memory)
    for i in written:
        if sum(storage_of(tensor) == storage_of(tensors[i]) for tensor in tensors) > 1:
            raise Untraceable(f"its step gives the compiled function {name} several views of a tensor that it writes")
    return written


def operands_written(call: RecordedCall) -> Iterator[Tensor]:
    """Yield the tensors that an operator writes."""
    declared = call.func._schema.arguments
    for argument, value in [*zip(declared, call.args, strict=False), *named(declared, call.kwargs)]:
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor))


def named(declared: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    return ((argument, kwargs[argument.name]) for argument in declared if argument.name in kwargs)


def fresh_results(returned: Sequence[Tensor], tensors: Sequence[Tensor], name: str) -> tuple[int, ...]:
    """Find which of the returned tensors are new; the others are arguments themselves, or returned twice.

    Raises:
        Untraceable: one is a view of another one, or of an argument.
    """
    distinct = {id(tensor): tensor for tensor in tensors}
    found = []
    for i, tensor in enumerate(returned):
        if id(tensor) in distinct:
            continue
        if any(storage_of(tensor) == storage_of(other) for other in distinct.values()):
            raise Untraceable(f"its step calls the compiled function {name}, which returns a view")
        distinct[id(tensor)] = tensor
        found.append(i)
    return tuple(found)


def body_of(calls: Sequence[RecordedCall], tensors: Sequence[Tensor], new: Sequence[Tensor], name: str) -> fx.Graph:
    """Write what a compiled function calls as written.

    Raises:
        Untraceable: it reads a tensor that is not among its arguments, or returns one.
    """
    body = RecordedGraph(f"its step calls the compiled function {name}, which uses a tensor that it is not given")
    for i, tensor in enumerate(tensors):
        body.stands_for(body.input(f"t{i}"), tensor)
    for call in calls:
        body.call(call, {})
    body.graph.output(tuple(map(body.node_of, new)))
    return body.graph


def storage_of(tensor: Tensor) -> int:
    """Return what tells apart the memory of two tensors."""
    return int(tensor.untyped_storage()._cdata)


def with_compiled_calls(graph: fx.Graph, parts: Sequence[CompiledPart], returned: int, inputs: int) -> fx.Graph:
    """Put the calls of compiled functions into a functional graph.

    Args:
        graph: a graph whose last inputs are what these calls give, in order. Its outputs are some that stay, what the
            calls are given, and the final values of all inputs.
        parts: the calls, in order.
        returned: the number of outputs that stay.
        inputs: the number of inputs that stay.

    Returns:
        A graph with the inputs and the outputs that stay, and the final values of these inputs.
    """
    if not parts:
        return graph
    found, stand_ins = outputs(graph), iter(placeholders(graph)[inputs:])
    given, finals = iter(found[returned:]), found[len(found) - len(placeholders(graph)) :]
    made = [[next(stand_ins) for _ in part.made] for part in parts]
    leaves = [{i: next(given) for i in part.given} for part in parts]
    copies = {node for own in leaves for node in own.values() if is_copy(node)}
    order = {node: i for i, node in enumerate(graph.nodes)}
    last = {max(copies.intersection(own.values()), key=order.__getitem__): k for k, own in enumerate(leaves)}
    absent = {node for own in made for node in own}
    new = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}

    def value(node: Any) -> Any:
        return env[node] if isinstance(node, fx.Node) else node

    for node in graph.nodes:
        if node in copies:  # values of a functional graph never change
            env[node] = env[node.args[0]]
        elif node.target is torch.ops.aten.copy.default and node.args[1] in absent and alike(*node.args):
            env[node] = env[node.args[1]]
        elif node.op != "output" and node not in absent:
            env[node] = new.node_copy(node, env.__getitem__)
        if node in last:
            k = last[node]
            args = tuple(value(leaves[k].get(i, leaf)) for i, leaf in enumerate(parts[k].leaves))
            name = parts[k].target.name.rpartition(".")[2]
            call = new.create_node("call_function", parts[k].target, args, name=name)
            call.meta["val"] = tuple(node.meta["val"] for node in made[k])
            for i, stand_in in enumerate(made[k]):
                env[stand_in] = new.call_function(operator.getitem, (call, i))
                env[stand_in].meta["val"] = stand_in.meta["val"]
    new.output(tuple(map(value, (*found[:returned], *finals[:inputs]))))
    new.lint()
    return new


def alike(one: fx.Node, other: fx.Node) -> bool:
    """Tell whether two tensors have equal shapes, dtypes and strides."""
    a, b = one.meta["val"], other.meta["val"]
    return bool((a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride()))


def is_copy(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.target is torch.ops.aten.clone.default
