"""Put the numbers of rank programs on the device, so that a recorded program can be replayed with other numbers.

A CUDA graph keeps the numbers that its kernels were launched with. So this module takes the arithmetic on
hyperparameters out of a program. The host does that arithmetic, in double precision as before, and passes the results
to the operators as 0-d tensors. If an operator takes Python numbers only, a *form* that takes such tensors replaces it
(`scalar_ops`). An operator without a form keeps its number, so another value needs another recording.

Every operator keeps its number until the number changes for the first time. The reason is that forms need more
launches, and that they add in another order than the library's products.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, fx

from canzona_compile.codegen.launch import GroupedKernel
from canzona_compile.compat.torch_private import OpOverload
from canzona_compile.ir import program_ops
from canzona_compile.ir.fx_utils import outputs, placeholders
from canzona_compile.ir.program import Program
from canzona_compile.runtime.scalar_ops import FORMS, each_numbered

# How a value reaches its operator: in a 0-d tensor ("device"), as a number that a recording keeps ("kept"), or in the
# table of a generated kernel ("table").
ScalarKind = Literal["device", "kept", "table"]


@dataclass(frozen=True, eq=False, slots=True)
class DeviceProgram:
    """A program in two parts: the arithmetic on numbers, for the host, and the rest.

    Attributes:
        host: takes the numbers among the program's inputs, in order, and returns the values that operators take.
        module: takes the program's inputs and then the values of `host`. A value of kind "device" is passed as a
            `DeviceNumber`, all others as they are. The module does not read the numbers among the program's inputs.
        kinds: the kind of each value of `host`.
        tables: for each generated kernel, by name, and for each of its parts, the indices of the values that it reads.
        lists: for each generated kernel, by name, and for each of its parts, the index of the program's input that
            each list of tensors is; None for lists that the program computes.
        listed: the indices of the inputs that nothing but generated kernels reads or writes.
        movable: the names of inputs from which a value of kind "kept" comes that could be of kind "device". If such an
            input changes, the program should be split again.
    """

    host: fx.GraphModule
    module: fx.GraphModule
    kinds: tuple[ScalarKind, ...]
    tables: Mapping[str, tuple[tuple[int, ...], ...]]
    lists: Mapping[str, tuple[tuple[int | None, ...], ...]]
    listed: frozenset[int]
    movable: frozenset[str]


def with_device_numbers(program: Program, numbers: Sequence[str], changing: Collection[str]) -> DeviceProgram:
    """Split a program into the arithmetic on its numbers and the rest.

    Args:
        program: the program as `emit` wrote it; it does not change.
        numbers: the names of the inputs that are Python numbers. Hyperparameters that are tensors do not belong here.
        changing: those of `numbers` that may change from step to step. An operator keeps a value that comes from other
            inputs alone.

    Returns:
        Both parts.
    """
    return _Splitter(program, numbers, changing).split()


@dataclass(frozen=True, slots=True)
class _Cut:
    """A copy of a graph without its arithmetic on numbers.

    Attributes:
        name: the name of the submodule that holds the copy.
        takes: the numbers that the copy takes as additional inputs, in order: for each one the node of the old graph
            that computes it, and how it reaches its operator.
    """

    name: str
    takes: tuple[tuple[fx.Node, ScalarKind], ...]


class _Splitter:
    """Writes the two parts of one program; see `with_device_numbers`."""

    def __init__(self, program: Program, numbers: Sequence[str], changing: Collection[str]) -> None:
        self.old, self.numbers, self.changing = program.module, numbers, frozenset(changing)
        self.sources: dict[fx.Node, frozenset[str]] = {}  # by node of `host`, the inputs from which it is computed
        self.movable: frozenset[str] = frozenset()
        self.host, self.root = fx.Graph(), torch.nn.Module()
        self.graph = fx.Graph()
        self.values: dict[tuple[fx.Node, ScalarKind], fx.Node] = {}  # by node of `host`, the placeholder in `graph`
        self.results: dict[fx.Node, list[fx.Node]] = {}  # by call of a graph of numbers alone, its results in `host`
        self.known: dict[Hashable, fx.Node] = {}  # the arithmetic that `host` has already
        self.cuts: dict[Hashable, _Cut] = {}

    def split(self) -> DeviceProgram:
        """Go through the program once, node by node, and write both parts."""
        new: dict[fx.Node, fx.Node] = {}
        on_host = {name: self.host.placeholder(name) for name in self.numbers}
        self.sources |= {node: frozenset([name]) for name, node in on_host.items()}
        for node in self.old.graph.nodes:
            numbers = {n: on_host[n.name] for n in node.all_input_nodes if n.name in on_host}
            if node.op == "get_attr":
                self.root.add_module(str(node.target), self.old.get_submodule(str(node.target)))
            own = self.old.get_submodule(str(node.target)) if node.op == "call_module" else None
            if isinstance(own, GroupedKernel):
                new[node] = self.kernel(node, own, new)
            elif isinstance(own, fx.GraphModule) and numbers and numbers_only(own.graph):
                inlined = self.inline(own.graph, given(own.graph, node.args, numbers))
                self.results[node] = [inlined[n] for n in outputs(own.graph)]
            elif numbers and (own is not None or node.target is program_ops.each):
                new[node] = self.call(node, new, numbers)
            elif numbers and node.op == "call_function":
                kept = {n: self.value(number, "kept") for n, number in numbers.items()}
                new[node] = self.graph.node_copy(node, (new | kept).__getitem__)
            else:
                new[node] = self.graph.node_copy(node, new.__getitem__)
                if own is not None:
                    self.root.add_module(str(node.target), own)
        self.host.output(tuple(node for node, _ in self.values))
        self.graph.lint()
        kinds = tuple(kind for _, kind in self.values)
        host = fx.GraphModule(torch.nn.Module(), self.host, class_name="HostNumbers")
        module = fx.GraphModule(self.root, self.graph, class_name="DeviceProgram")
        return DeviceProgram(host, module, kinds, self.tables(), *self.operands(), self.movable)

    def kernel(self, node: fx.Node, kernel: GroupedKernel, new: Mapping[fx.Node, fx.Node]) -> fx.Node:
        """Write the call of a generated kernel. The host computes its numbers.

        Args:
            node: the call in the old program.
            kernel: the kernel that it calls.
            new: the new node for each node of the old program before the call.
        """
        self.root.add_module(str(node.target), kernel)
        parts: list[Any] = []
        for part in node.args:
            lists, numbers = cast(tuple[Any, Any], part)
            if isinstance(numbers, fx.Node):
                known = self.results.get(numbers)
                numbers = tuple(self.value(n, "table") for n in known) if known is not None else new[numbers]
            parts.append((fx.map_arg(lists, new.__getitem__), numbers))
        return self.graph.call_module(str(node.target), tuple(parts))

    def tables(self) -> dict[str, tuple[tuple[int, ...], ...]]:
        """Find which values each generated kernel reads; see `DeviceProgram.tables`."""
        place = {node: i for i, node in enumerate(self.values.values())}
        return {
            str(node.target): tuple(tuple(place[n] for n in numbers) for _, numbers in node.args)
            for node in self.graph.nodes
            if self.runs_kernel(node)
        }

    def operands(self) -> tuple[dict[str, tuple[tuple[int | None, ...], ...]], frozenset[int]]:
        """Find the tensors that generated kernels work on; see `DeviceProgram.lists` and `DeviceProgram.listed`."""
        inputs = {node: i for i, node in enumerate(placeholders(self.graph))}
        found = {
            str(node.target): tuple(tuple(inputs.get(n) for n in lists) for lists, _ in node.args)
            for node in self.graph.nodes
            if self.runs_kernel(node)
        }
        return found, frozenset(i for node, i in inputs.items() if all(map(self.runs_kernel, node.users)))

    def runs_kernel(self, node: fx.Node) -> bool:
        """Whether a node of the new program calls a generated kernel."""
        return node.op == "call_module" and isinstance(self.root.get_submodule(str(node.target)), GroupedKernel)

    def call(self, node: fx.Node, new: Mapping[fx.Node, fx.Node], numbers: Mapping[fx.Node, fx.Node]) -> fx.Node:
        """Write a call that has numbers among its arguments: of a module, or of a loop that calls one for each task.

        Args:
            node: the call in the old program.
            new: the new node for each node of the old program before the call.
            numbers: for each number among the arguments, the node of `host` that computes it.
        """
        looped = node.target is program_ops.each
        called: Any = node.args[0] if looped else node
        name, arguments = str(called.target), node.args[looped:]
        module = self.old.get_submodule(name)
        assert isinstance(module, fx.GraphModule)
        inlined = self.inline(module.graph, given(module.graph, arguments, numbers))
        cut = self.cut(name, module.graph, inlined)
        args: list[Any] = [fx.map_arg(a, new.__getitem__) for a in arguments if a not in numbers]
        args += [self.value(inlined[single], kind) for single, kind in cut.takes]
        if not looped:
            return self.graph.call_module(cut.name, tuple(args))
        return self.graph.call_function(program_ops.each, (self.graph.get_attr(cut.name), *args))

    def inline(self, graph: fx.Graph, given: Mapping[fx.Node, fx.Node]) -> dict[fx.Node, fx.Node]:
        """Copy a graph's arithmetic on numbers to `host`. Equal arithmetic of several graphs is copied once.

        Args:
            graph: the graph of a module that the program calls.
            given: for each placeholder of `graph` that is a number, the node of `host` that computes it.

        Returns:
            For each node of `graph` that is a number, the node of `host` that computes it.
        """
        found = dict(given)
        for node in graph.nodes:
            if arithmetic(node, found):
                args, kwargs = fx.map_arg((node.args, node.kwargs), found.__getitem__)
                key = (node.target, repr(args), repr(kwargs))
                if key not in self.known:
                    made = self.known[key] = self.host.call_function(node.target, args, kwargs)
                    self.sources[made] = frozenset[str]().union(*(self.sources[n] for n in made.all_input_nodes))
                found[node] = self.known[key]
        return found

    def value(self, number: fx.Node, kind: ScalarKind) -> fx.Node:
        """The placeholder for a value that the host computes. It is made if the new program has none yet."""
        if (number, kind) not in self.values:
            last = next((n for n in reversed(self.graph.nodes) if n.op == "placeholder"), None)
            with self.graph.inserting_after(last):
                self.values[number, kind] = self.graph.placeholder(f"number_{len(self.values)}")
        return self.values[number, kind]

    def cut(self, name: str, graph: fx.Graph, singles: Mapping[fx.Node, fx.Node]) -> _Cut:
        """Copy a graph without its arithmetic on numbers. Operators take device numbers where they have a form.

        Args:
            name: the name of the submodule that holds the graph.
            graph: the graph.
            singles: for each node that is a number, the node of `host` that computes it.

        Returns:
            The copy. Calls share one if the same of their numbers may change.
        """
        moving = {n for n, on_host in singles.items() if self.sources[on_host] & self.changing}
        for node in graph.nodes:
            if node not in singles and form_of(node) is not None:
                still = [singles[n] for n in node.all_input_nodes if n in singles and n not in moving]
                self.movable = self.movable.union(*(self.sources[n] for n in still))
        key = name, tuple((n.name, n in moving) for n in singles)
        if key in self.cuts:
            return self.cuts[key]
        made = fx.Graph()
        new: dict[fx.Node, fx.Node] = {}
        takes: dict[tuple[fx.Node, ScalarKind], fx.Node] = {}
        last: fx.Node | None = None
        for node in graph.nodes:
            if node in singles:
                continue
            own = [n for n in node.all_input_nodes if n in singles]
            form = form_of(node) if any(n in moving for n in own) else None
            kinds: dict[fx.Node, ScalarKind] = {
                n: "device" if form is not None and n in moving else "kept" for n in own
            }
            for single, kind in kinds.items():
                if (single, kind) not in takes:
                    with made.inserting_after(last) if last else made.inserting_before(next(iter(made.nodes), None)):
                        last = takes[single, kind] = made.placeholder(f"number_{len(takes)}")

            def operand_of(n: fx.Node, kinds: Mapping[fx.Node, ScalarKind] = kinds) -> fx.Node:
                return takes[n, kinds[n]] if n in singles else new[n]

            new[node] = made.node_copy(node, operand_of)
            if node.op == "placeholder":
                last = new[node]
            if form is not None:
                new[node].target = each_numbered if node.target is program_ops.each else form
        unique = f"{name}_{len(self.cuts)}"
        self.root.add_module(unique, fx.GraphModule(self.old.get_submodule(name), made, class_name=unique))
        self.cuts[key] = _Cut(unique, tuple(takes))
        return self.cuts[key]


def numbers_only(graph: fx.Graph) -> bool:
    """Whether a graph does nothing but arithmetic on numbers. Graphs that write tensors in place return nothing."""
    known: set[fx.Node] = set(placeholders(graph))
    for node in graph.nodes:
        if node.op in ("call_function", "call_module", "call_method"):
            if not arithmetic(node, known):
                return False
            known.add(node)
    return all(isinstance(n, fx.Node) and n in known for n in outputs(graph))


def given(graph: fx.Graph, arguments: Sequence[Any], numbers: Mapping[fx.Node, fx.Node]) -> dict[fx.Node, fx.Node]:
    """For each placeholder of a called graph that gets a number, the node of `host` that computes the number.

    Args:
        graph: the graph that is called.
        arguments: of the call.
        numbers: for each number among the arguments, the node of `host` that computes it.
    """
    return {i: numbers[a] for i, a in zip(placeholders(graph), arguments, strict=True) if a in numbers}


def arithmetic(node: fx.Node, numbers: Any) -> bool:
    """Whether a node computes a number from numbers alone.

    Args:
        node: the node. ATen operators never do, because they return tensors.
        numbers: the nodes that are numbers.
    """
    operands = node.all_input_nodes
    plain = node.op == "call_function" and not isinstance(node.target, OpOverload)
    return plain and node.target is not program_ops.each and bool(operands) and all(n in numbers for n in operands)


def form_of(node: fx.Node) -> Callable[..., Tensor] | None:
    """The form of a node's operator that takes device numbers; None if it has none."""
    target: Any = node.args[0] if node.target is program_ops.each else node.target
    return FORMS.get(target) if node.op == "call_function" else None
