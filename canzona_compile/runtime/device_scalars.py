"""Rank programs whose numbers lie on the device, so that a recorded program can be replayed with other numbers.

A CUDA graph keeps the numbers that its kernels were launched with. This module takes the arithmetic on
hyperparameters out of a program. The host does that arithmetic, in double precision as before, and hands its results
to the operators as 0-d tensors. An operator that takes Python numbers only is replaced by a form that takes such
tensors (`scalar_ops`). An operator without such a form keeps its number, so another value needs another recording.
Every operator keeps its number as long as the number has never changed: forms take more launches, and they add in
another order than the library's products.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, fx

from canzona_compile.codegen.launch import GroupedKernel
from canzona_compile.ir import program_ops
from canzona_compile.ir.fx_utils import outputs, placeholders
from canzona_compile.ir.program import Program
from canzona_compile.runtime.scalar_ops import FORMS, each_numbered

# How a value reaches its operator: in a 0-d tensor; as a number, which a recording keeps; or in a kernel's table.
ScalarKind = Literal["device", "kept", "table"]


@dataclass(frozen=True, eq=False, slots=True)
class DeviceProgram:
    """A program in two parts: arithmetic on the host, and the rest.

    Attributes:
        host: takes the numbers among the program's inputs, in order; returns the values that operators take.
        module: takes the program's inputs, then the values of `host`: as `DeviceNumber` where their kind is
            "device", else as they are. It does not read the numbers among the program's inputs.
        kinds: one per value.
        tables: by the name of each generated kernel, for each of its parts the indices of the values that it reads.
        movable: names of inputs from which values of kind "kept" come that could be of kind "device". If such an
            input changes, the program should be split anew.
    """

    host: fx.GraphModule
    module: fx.GraphModule
    kinds: tuple[ScalarKind, ...]
    tables: Mapping[str, tuple[tuple[int, ...], ...]]
    movable: frozenset[str]


def with_device_numbers(program: Program, numbers: Sequence[str], changing: Collection[str]) -> DeviceProgram:
    """Split a program into the arithmetic on its numbers and the rest.

    Args:
        program: the program as it was emitted; it is not changed.
        numbers: the names of its inputs that are Python numbers. Hyperparameters that are tensors are not among them.
        changing: those of `numbers` that may change from step to step. Values that come from the others alone are
            of kind "kept".

    Returns:
        Both parts.
    """
    return _Splitter(program, numbers, changing).split()


@dataclass(frozen=True, slots=True)
class _Cut:
    """A copy of a graph without its arithmetic on numbers.

    Attributes:
        name: of the submodule.
        takes: the numbers that it takes in addition, in the order of its inputs: the node of the old graph that
            computes each, and how the number reaches its operator.
    """

    name: str
    takes: tuple[tuple[fx.Node, ScalarKind], ...]


class _Splitter:
    """Writes the two parts of one program."""

    def __init__(self, program: Program, numbers: Sequence[str], changing: Collection[str]) -> None:
        self.old, self.numbers, self.changing = program.module, numbers, frozenset(changing)
        self.sources: dict[fx.Node, frozenset[str]] = {}  # by node of `host`, the inputs that it comes from
        self.movable: frozenset[str] = frozenset()
        self.host, self.root = fx.Graph(), torch.nn.Module()
        self.graph = fx.Graph()
        self.values: dict[tuple[fx.Node, ScalarKind], fx.Node] = {}  # by node of `host`
        self.results: dict[fx.Node, list[fx.Node]] = {}  # by call of a graph of numbers, its results in `host`
        self.known: dict[Hashable, fx.Node] = {}  # arithmetic that is in `host` already
        self.cuts: dict[Hashable, _Cut] = {}

    def split(self) -> DeviceProgram:
        """Go through the program once, node by node."""
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
                inlined = self.inline(own.graph, self.given(node, own.graph, numbers))
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
        return DeviceProgram(host, module, kinds, self.tables(), self.movable)

    def kernel(self, node: fx.Node, kernel: GroupedKernel, new: Mapping[fx.Node, fx.Node]) -> fx.Node:
        """Write the call of a generated kernel, whose numbers the host computes."""
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
        """Which values each generated kernel reads, see `DeviceProgram.tables`."""
        place = {node: i for i, node in enumerate(self.values.values())}
        found: dict[str, tuple[tuple[int, ...], ...]] = {}
        for node in self.graph.nodes:
            if node.op == "call_module" and isinstance(self.root.get_submodule(str(node.target)), GroupedKernel):
                found[str(node.target)] = tuple(tuple(place[n] for n in numbers) for _, numbers in node.args)
        return found

    def given(self, node: fx.Node, graph: fx.Graph, numbers: Mapping[fx.Node, fx.Node]) -> dict[fx.Node, fx.Node]:
        """By placeholder of a called graph, the node of `host` that the call passes for it."""
        return {i: numbers[a] for i, a in zip(placeholders(graph), node.args, strict=True) if a in numbers}  # type: ignore[index]

    def call(self, node: fx.Node, new: Mapping[fx.Node, fx.Node], numbers: Mapping[fx.Node, fx.Node]) -> fx.Node:
        """Write the call of a module, or the loop over tasks that calls one, with numbers among its arguments."""
        looped = node.target is program_ops.each
        arguments = list(node.args[1:] if looped else node.args)
        attribute: Any = node.args[0] if looped else None
        name = str(attribute.target) if looped else str(node.target)
        module = self.old.get_submodule(name)
        assert isinstance(module, fx.GraphModule)
        inputs = [n for n in module.graph.nodes if n.op == "placeholder"]
        given = {i: numbers[a] for i, a in zip(inputs, arguments, strict=True) if a in numbers}  # type: ignore[index]
        inlined = self.inline(module.graph, given)
        cut = self.cut(name, module.graph, inlined)
        kept = [a for i, a in zip(inputs, arguments, strict=True) if i not in given]
        args: list[Any] = [fx.map_arg(a, new.__getitem__) for a in kept]
        args += [self.value(inlined[single], kind) for single, kind in cut.takes]
        if not looped:
            return self.graph.call_module(cut.name, tuple(args))
        return self.graph.call_function(program_ops.each, (self.graph.get_attr(cut.name), *args))

    def inline(self, graph: fx.Graph, given: Mapping[fx.Node, fx.Node]) -> dict[fx.Node, fx.Node]:
        """Copy a graph's arithmetic on numbers to `host`, once where several graphs do the same.

        Args:
            graph: of a module that the program calls.
            given: by placeholder of `graph`, the node of `host` that it stands for.

        Returns:
            By node of `graph` that is a number, the node of `host` that computes it.
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
        """The placeholder for a value that the host computes; made now if the program has none yet."""
        if (number, kind) not in self.values:
            last = next((n for n in reversed(self.graph.nodes) if n.op == "placeholder"), None)
            with self.graph.inserting_after(last):
                self.values[number, kind] = self.graph.placeholder(f"number_{len(self.values)}")
        return self.values[number, kind]

    def cut(self, name: str, graph: fx.Graph, singles: Mapping[fx.Node, fx.Node]) -> _Cut:
        """Copy a graph without its arithmetic on numbers; operators take device numbers where they can.

        Args:
            name: of the submodule that holds the graph.
            graph: the graph.
            singles: by node that is a number, the node of `host` that computes it.

        Returns:
            The copy, which is the same for calls with the same numbers moving.
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
                    with made.inserting_after(last) if last else made.inserting_before(first_of(made)):
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
    """Does a graph return numbers only, computed from its inputs by arithmetic alone?"""
    known: set[fx.Node] = set(placeholders(graph))
    for node in graph.nodes:
        if node.op == "call_function" and arithmetic(node, known):
            known.add(node)
    return all(isinstance(n, fx.Node) and n in known for n in outputs(graph))


def first_of(graph: fx.Graph) -> fx.Node | None:
    """The first node of a graph; None if it has none."""
    return next(iter(graph.nodes), None)


def arithmetic(node: fx.Node, numbers: Any) -> bool:
    """Does a node compute a number from numbers alone? Operators of ATen do not: they return tensors."""
    operands = node.all_input_nodes
    plain = node.op == "call_function" and not isinstance(node.target, torch._ops.OpOverload)
    return plain and node.target is not program_ops.each and bool(operands) and all(n in numbers for n in operands)


def form_of(node: fx.Node) -> Callable[..., Tensor] | None:
    """The form of a node's operator that takes device numbers; None if it has none."""
    target: Any = node.args[0] if node.target is program_ops.each else node.target
    return FORMS.get(target) if node.op == "call_function" else None
