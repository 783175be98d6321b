"""Build the graph of a rank program: its placeholders, which stand for inputs, its calls and its submodules."""

from __future__ import annotations

import contextlib
import copy
import operator
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from canzona_compile.analysis.linear_algebra import any_strides
from canzona_compile.ir import program_ops, storage
from canzona_compile.ir.program import (
    Bytes,
    EagerTasks,
    Fragments,
    Indices,
    Input,
    Program,
    Residents,
    ScalarInput,
    Views,
    Whole,
)
from canzona_compile.ir.step import Event, Placed, Role, Step
from canzona_compile.lowering.stream_sync import CALLER, order_streams


class ProgramBuilder:
    """Collects the graph of a rank program and its inputs.

    Attributes:
        root: the module that holds the submodules that the graph calls.
        inputs: the inputs so far, by the name of their placeholder.
        collectives: how many collectives the program starts so far.
        event: the event of the schedule that the next calls belong to.
    """

    def __init__(self, step: Step) -> None:
        self.step = step
        self.graph = fx.Graph()
        self.root = torch.nn.Module()
        self.inputs: dict[str, Input] = {}
        self.placeholders: dict[Input, fx.Node] = {}
        self.last_input: fx.Node | None = None
        self.collectives = 0
        self.stream = CALLER
        self.event: Event | None = None
        self.fetched: dict[int, dict[fx.Node, fx.Node]] = defaultdict(dict)  # by micro-group and input, what is open
        self.written_leaves: set[fx.Node] = set()  # the inputs of leaves that are stored again
        self.events: dict[fx.Node, Event] = {}
        self.streams: dict[fx.Node, str] = {}  # the stream of each call
        self.written: dict[fx.Node, list[fx.Node]] = {}  # for some calls, the arguments that they write

    def bind(self, label: str, value: Input) -> fx.Node:
        """The placeholder of an input. Equal inputs share one, except for views, indices and byte counts."""
        shared = not isinstance(value, Views | Whole | Indices | Bytes)
        if shared and value in self.placeholders:
            return self.placeholders[value]
        if self.last_input is None:
            with self.graph.inserting_before(next(iter(self.graph.nodes), None)):
                node = self.graph.placeholder(label)
        else:
            with self.graph.inserting_after(self.last_input):
                node = self.graph.placeholder(label)
        node.target = node.name  # FX made the name unique; the generated signature shows the target
        self.inputs[node.name] = value
        self.last_input = node
        if shared:
            self.placeholders[value] = node
        return node

    def leaf(self, placed: Placed, group: int, names: tuple[str, ...], name: str, where: str) -> fx.Node:
        """The placeholder of leaf `name` of a template for the tasks `names`. `where` begins its label."""
        known = {leaf.name: leaf for leaf in placed.template.inputs}
        role = known[name].role if name in known else Role.STATE
        match role:
            case Role.SCALAR:
                return self.bind(f"{name}_{group}", ScalarInput(placed.template.name, group, name))
            case Role.TASK:
                return self.bind(f"{where}_tasks", EagerTasks(names))
            case Role.STATE if name in placed.resident:
                found = self.bind(f"{where}_{name}_resident", Residents(name, names))
            case _:
                found = self.bind(f"{where}_{name}", Fragments(role, name, names))
        return found if self.event is None else self.fetched[self.event.micro_group].get(found, found)

    def open_leaf(
        self, placed: Placed, group: int, names: tuple[str, ...], name: str, where: str, *, inside: bool
    ) -> None:
        """Open a stored leaf: what `leaf` returns from now on is its values.

        Args:
            inside: whether prepare's kernel opens it. For bfloat16, `leaf` then returns the stored tensors, which that
                kernel reads and writes. For int8 it returns empty tensors for the new values, and `store` rounds these.
                Nothing else in the micro-group may read the leaf.
        """
        stored = self.leaf(placed, group, names, name, where)
        assert self.event is not None
        if not inside:
            values = self.call(storage.fetch, stored)
        elif placed.stored[name].dtype == "int8":
            values = self.call(storage.room, stored)
        else:
            values = self.call(storage.part, stored, 0)
        self.fetched[self.event.micro_group][stored] = values
        if name in placed.template.writes and values.target is not storage.part:
            self.written_leaves.add(stored)

    def call(self, function: Callable[..., Any], *args: Any) -> fx.Node:
        """Add the call of a function on the present stream."""
        return self.placed(self.graph.call_function(function, args))

    def placed(self, node: fx.Node) -> fx.Node:
        """Let a call run on the present stream, and return it."""
        self.streams[node] = self.stream
        if self.event is not None:
            self.events[node] = self.event
        return node

    @contextlib.contextmanager
    def on(self, stream: str) -> Iterator[None]:
        """A context in which calls are added on this stream."""
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    def module(self, name: str, build: Callable[[], fx.Graph], lookup: Callable[[str], fx.Node]) -> fx.Node:
        """Add the call of a lifted graph."""
        name, arguments = self.submodule(name, build, lookup)
        return self.placed(self.graph.call_module(name, tuple(arguments)))

    def loop(self, name: str, graph: fx.Graph, lookup: Callable[[str], fx.Node]) -> fx.Node:
        """Add a loop that calls `graph`, the graph of one task, for each task. Its arguments are lists."""
        name, arguments = self.submodule(name, lambda: copy.deepcopy(graph), lookup)
        return self.call(program_ops.each, self.graph.get_attr(name), *arguments)

    def submodule(
        self, name: str, build: Callable[[], fx.Graph], lookup: Callable[[str], fx.Node]
    ) -> tuple[str, list[fx.Node]]:
        name = name.replace("@", "_on_").replace("+", "_")
        if not hasattr(self.root, name):
            graph = build()
            any_strides(graph)  # it was captured on contiguous tensors, and fragments may be others
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.root.add_module(name, fx.GraphModule(torch.nn.Module(), graph, class_name=name))
        own = self.root.get_submodule(name)
        assert isinstance(own, fx.GraphModule)
        return name, [lookup(str(n.target)) for n in own.graph.nodes if n.op == "placeholder"]

    def items(self, node: fx.Node, count: int) -> list[fx.Node]:
        return [self.graph.call_function(operator.getitem, (node, i)) for i in range(count)]

    def program(self, slots: tuple[int, ...]) -> Program:
        """Finish the graph, with its streams and events, and return the program.

        Args:
            slots: the size in bytes of each memory slot to which the views refer.
        """
        self.graph.output(())
        order_streams(
            self.graph, self.streams, self.inputs, lambda streams: self.bind("streams", streams), self.written
        )
        module = fx.GraphModule(self.root, self.graph, class_name="RankProgram")
        module.graph.lint()
        order = [n.name for n in module.graph.nodes if n.op == "placeholder"]
        inputs = {name: self.inputs[name] for name in order}
        events = {node.name: event for node, event in self.events.items()}
        return Program(module, inputs, slots, self.collectives, events=events)
