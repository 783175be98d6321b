"""Small pointwise graphs, and what a generated kernel makes of them in Triton's interpreter."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from canzona_compile import passes
from canzona_compile.codegen.launch import GroupedKernel
from canzona_compile.codegen.source import PointwiseProgram, expressions
from canzona_compile.ir.fx_utils import outputs
from tests.harness.samples import Builder, empty

Values = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Work:
    """A graph, and values by the names of its placeholders for every fragment; numbers are those of the first."""

    graph: fx.Graph
    shape: tuple[int, ...]
    fragments: Sequence[Values]
    name: str = "work"

    def program(self) -> PointwiseProgram:
        made = expressions(self.graph, range(len(outputs(self.graph))), self.shape)
        return PointwiseProgram(self.name, made, tuple((dtype,) for _, dtype in made.results))

    def expected(self) -> list[list[Tensor]]:
        """By fragment: what torch gives."""
        module = fx.GraphModule(torch.nn.Module(), copy.deepcopy(self.graph))
        names = [str(n.target) for n in self.graph.nodes if n.op == "placeholder"]
        return [list(module(*(values[name] for name in names))) for values in self.fragments]


def run_grouped(works: Sequence[Work]) -> tuple[list[list[list[Tensor]]], GroupedKernel]:
    """All works in one launch: by work, fragment and result, what the kernel wrote."""
    programs: dict[str, PointwiseProgram] = {}
    parts, arguments, found = [], [], []
    for work in works:
        program = work.program()
        key = programs.setdefault(program.key, program).key
        parts.append(list(programs).index(key))
        shapes = [torch.broadcast_shapes(*(t.shape for t in tensors(v))) for v in work.fragments]
        written = [[torch.full(shape, 77).to(d[0]) for d in program.targets] for shape in shapes]
        by_name = {n.name: str(n.target) for n in work.graph.nodes}
        lists = [[values[by_name[load.name]] for values in work.fragments] for load in program.expressions.loads]
        lists += [[own[i] for own in written] for i in range(len(program.targets))]
        arguments.append((tuple(lists), numbers(work, program)))
        found.append(written)
    kernel = GroupedKernel("a test", list(programs.values()), parts)
    kernel(*arguments)
    return found, kernel


def tensors(values: Values) -> Iterator[Tensor]:
    return (v for v in values.values() if isinstance(v, Tensor))


def numbers(work: Work, program: PointwiseProgram) -> list[float]:
    """The numbers that a program reads, computed by the graph's own nodes."""
    known: dict[str, Any] = {}
    for node in work.graph.nodes:
        if node.op == "placeholder":
            known[node.name] = work.fragments[0][str(node.target)]
        elif node.op == "call_function" and not isinstance(node.meta["val"], Tensor):
            known[node.name] = node.target(*fx.map_arg(node.args, lambda n: known[n.name]))
    return [known[number.source] for number in program.expressions.numbers]


def one_call(op: Callable[..., Any], operands: Sequence[Tensor], *extra: Any, **options: Any) -> Work:
    """One operator."""
    names = [f"x{i}" for i in range(len(operands))]
    shape = tuple(operands[0].shape)
    b = Builder(**{n: empty(tuple(x.shape), x.dtype) for n, x in zip(names, operands, strict=True)})
    graph = b.returns(b.call("y", op, *(b[n] for n in names), *extra, **options))
    return Work(graph, shape, [dict(zip(names, operands, strict=True))], str(op))


@contextmanager
def generating() -> Iterator[None]:
    """Programs on CPU as they are on CUDA: with generated kernels, in the interpreter."""
    before = passes.generates
    passes.generates = lambda machine: True
    try:
        yield
    finally:
        passes.generates = before


def kernels_of(optimizer: Any) -> dict[str, GroupedKernel]:
    """The generated kernels of a wrapped optimizer's last program, by name."""
    module = optimizer.canzona.step.program.module
    return {name: child for name, child in module.named_children() if isinstance(child, GroupedKernel)}
