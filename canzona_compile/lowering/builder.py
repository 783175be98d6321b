"""Building blocks of rank programs: placeholders that know what they stand for, calls, submodules."""

from __future__ import annotations

import contextlib
import copy
import operator
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from canzona_compile.ir import program_ops
from canzona_compile.ir.program import Bytes, Indices, Input, Program, Views, Whole
from canzona_compile.lowering.stream_sync import CALLER, order_streams


class ProgramBuilder:
    """A graph under construction and its inputs."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.root = torch.nn.Module()
        self.inputs: dict[str, Input] = {}
        self.placeholders: dict[Input, fx.Node] = {}
        self.last_input: fx.Node | None = None
        self.collectives = 0
        self.stream = CALLER
        self.streams: dict[fx.Node, str] = {}  # on which each call runs
        self.written: dict[fx.Node, list[fx.Node]] = {}  # by call, its arguments that it writes, where that is known

    def bind(self, label: str, value: Input) -> fx.Node:
        """The placeholder of an input; one per distinct input (views are distinct already)."""
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

    def call(self, function: Callable[..., Any], *args: Any) -> fx.Node:
        return self.placed(self.graph.call_function(function, args))

    def placed(self, node: fx.Node) -> fx.Node:
        self.streams[node] = self.stream
        return node

    @contextlib.contextmanager
    def on(self, stream: str) -> Iterator[None]:
        """While open, calls run on this stream."""
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    def module(self, name: str, build: Callable[[], fx.Graph], lookup: Callable[[str], fx.Node]) -> fx.Node:
        """Call the lifted graph `name`, built on first use; its inputs are looked up by name."""
        name, arguments = self.submodule(name, build, lookup)
        return self.placed(self.graph.call_module(name, tuple(arguments)))

    def loop(self, name: str, graph: fx.Graph, lookup: Callable[[str], fx.Node]) -> fx.Node:
        """Call `graph`, which is that of one task, for every task of lists."""
        name, arguments = self.submodule(name, lambda: copy.deepcopy(graph), lookup)
        return self.call(program_ops.each, self.graph.get_attr(name), *arguments)

    def submodule(
        self, name: str, build: Callable[[], fx.Graph], lookup: Callable[[str], fx.Node]
    ) -> tuple[str, list[fx.Node]]:
        name = name.replace("@", "_on_").replace("+", "_")
        if not hasattr(self.root, name):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.root.add_module(name, fx.GraphModule(torch.nn.Module(), build(), class_name=name))
        own = self.root.get_submodule(name)
        assert isinstance(own, fx.GraphModule)
        return name, [lookup(str(n.target)) for n in own.graph.nodes if n.op == "placeholder"]

    def items(self, node: fx.Node, count: int) -> list[fx.Node]:
        return [self.graph.call_function(operator.getitem, (node, i)) for i in range(count)]

    def program(self, slots: tuple[int, ...]) -> Program:
        """What was written.

        Args:
            slots: bytes of each memory slot that its views refer to.
        """
        self.graph.output(())
        order_streams(
            self.graph, self.streams, self.inputs, lambda streams: self.bind("streams", streams), self.written
        )
        module = fx.GraphModule(self.root, self.graph, class_name="RankProgram")
        module.graph.lint()
        order = [n.name for n in module.graph.nodes if n.op == "placeholder"]
        inputs = {name: self.inputs[name] for name in order}
        return Program(module, inputs, slots, self.collectives)
