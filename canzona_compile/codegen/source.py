"""Write the source text of a grouped kernel.

It has one function per pointwise program, and a kernel. Each block of the kernel looks up its segment, and the function
of the segment's program computes the block's tiles, one after another. What all of them need is loaded before: where
the segment lies, and its numbers. Those loads wait for one another, too long for the work of one tile.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from canzona_compile.codegen.rules import RULES
from canzona_compile.codegen.values import (
    STORED,
    Assignment,
    Builder,
    LoadValue,
    ScalarValue,
    Spread,
    Unsupported,
    check,
    converted,
)
from canzona_compile.ir.fx_utils import ancestors, is_operator, outputs, tensor_value
from canzona_compile.ir.layout import Shape
from canzona_compile.ir.storage import BLOCK as SCALED


@dataclass(frozen=True, slots=True)
class Expressions:
    """A pointwise graph in Triton.

    Attributes:
        loads: the tensors that the graph reads, under the names of their nodes.
        results: for every result, the name of its value and the dtype to which it is rounded.
    """

    loads: tuple[LoadValue, ...]
    numbers: tuple[ScalarValue, ...]
    lines: tuple[Assignment, ...]
    results: tuple[tuple[str, torch.dtype], ...]

    @property
    def names(self) -> list[str]:
        """The names of all values."""
        return [*(x.name for x in self.loads), *(x.name for x in self.numbers), *(x.name for x in self.lines)]


def copying(source: torch.dtype, target: torch.dtype) -> Expressions:
    """The expressions that copy a tensor and cast it from dtype `source` to dtype `target`."""
    for dtype in (source, target):
        check(dtype)
    lines = () if source == target else (Assignment("result", converted("{value}", source, target)),)
    return Expressions(
        (LoadValue("value", source, Spread.FULL),), (), lines, ((lines[0].name if lines else "value", target),)
    )


def opening(made: Expressions, stored: Mapping[str, str], rounded: Sequence[bool]) -> Expressions:
    """The expressions that read and write state of float32 as it is stored (see `ir.storage`).

    Args:
        stored: by names of loads, what stores them: "int8" for codes and scales, or "bfloat16".
        rounded: which results are rounded to bfloat16.
    """
    loads, lines = list[LoadValue](), list[Assignment]()
    taken = set(made.names)

    def fresh(name: str) -> str:
        return name if name not in taken else fresh(f"{name}_")

    for load in made.loads:
        match stored.get(load.name):
            case "int8":
                codes, scales = fresh(f"{load.name}_codes"), fresh(f"{load.name}_scales")
                loads += [LoadValue(codes, torch.int8, load.spread), LoadValue(scales, torch.float32, Spread.BLOCKS)]
                lines.append(Assignment(load.name, f"{{{codes}}}.to(tl.float32) * {{{scales}}}"))
            case "bfloat16":
                loads.append(replace(load, dtype=torch.bfloat16))
            case _:
                loads.append(load)
    lines += made.lines
    results = list(made.results)
    for i in (i for i, wanted in enumerate(rounded) if wanted):
        name, dtype = results[i]
        results[i] = fresh(f"{name}_stored"), torch.bfloat16
        lines.append(Assignment(results[i][0], converted(f"{{{name}}}", dtype, torch.bfloat16)))
    return replace(made, loads=tuple(loads), lines=tuple(lines), results=tuple(results))


def expressions(graph: fx.Graph, wanted: Sequence[int], shape: Shape) -> Expressions:
    """Translate some results of a pointwise graph, and all nodes that they need, to Triton.

    Args:
        graph: a graph whose values have the shape `shape` or broadcast to it.
        shape: the shape of the whole matrix.
    """
    found = outputs(graph)
    builder = Builder(shape)
    results = []
    for i in wanted:
        node = found[i]
        value = tensor_value(node) if isinstance(node, fx.Node) else None
        if value is None:
            raise Unsupported(f"result {i} is not a tensor")
        if tuple(value.shape) != shape:
            raise Unsupported(f"result {node} has another shape than its matrix")
        results.append((node, value.dtype))
    needed = ancestors(node for node, _ in results)
    for node in graph.nodes:
        if node in needed:
            add(builder, node)
    return Expressions(
        tuple(builder.loads),
        tuple(builder.numbers.values()),
        tuple(builder.lines),
        tuple((node.name, dtype) for node, dtype in results),
    )


def add(builder: Builder, node: fx.Node) -> None:
    """Add the line of a node to `builder`. A number has no line, because the host computes it."""
    value = tensor_value(node)
    if value is None:
        return
    check(value.dtype)
    if node.op == "placeholder":
        builder.loads.append(LoadValue(node.name, value.dtype, builder.spread(tuple(value.shape))))
        return
    target = node.target
    rule = RULES.get(target.overloadpacket) if is_operator(target) else None
    if rule is None:
        raise Unsupported(f"{target} has no Triton spelling")
    builder.lines.append(Assignment(node.name, rule(builder, node)))


HEADER, WORDS = 7, 4  # int64 words of a row before its operands, and words per operand; the same as in arithmetic.py
TAKEN = {
    "row",
    "own",
    "numbers",
    "first",
    "end",
    "tile",
    "start",
    "lanes",
    "inside",
    "sizes",
    "BLOCK",
    "DIMS",
    "ALIGNED",
}
TAKEN |= {"tl", "ops", "triton"}
PLACE = re.compile(r"place_\d+")

PREAMBLE = '''"""{title}"""

import triton
import triton.language as tl

from canzona_compile.codegen import arithmetic as ops
'''

KERNEL = '''

@triton.jit(do_not_specialize=["tiles"])
def kernel(
    segments, rows, addresses, numbers, tiles, WIDTH: tl.constexpr, OPERANDS: tl.constexpr, BLOCK: tl.constexpr
):
    """Some tiles of one segment: `segments` says which, its row holds branch, first block, sizes and strides."""
    block = tl.program_id(0)
    segment = tl.load(segments + block).to(tl.int64)
    row = rows + segment * WIDTH
    own = addresses + segment * OPERANDS
    numbers += tl.load(row + 6)
    branch = tl.load(row)
    first = (block - tl.load(row + 1)) * tiles * BLOCK
    end = tl.minimum(first + tiles * BLOCK, tl.load(row + 2))
'''


@dataclass(frozen=True, slots=True)
class PointwiseProgram:
    """Expressions, and the tensors to which their results are written.

    Attributes:
        name: a readable name. Programs that differ in their names only share one function.
        targets: for each result, the dtypes of the tensors to which it is written.
    """

    name: str
    expressions: Expressions
    targets: tuple[tuple[torch.dtype, ...], ...]

    @property
    def reads(self) -> int:
        """The number of tensors that are read. They come before the tensors that are written in the operands."""
        return len(self.expressions.loads)

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtypes of all operands: first those of the tensors that are read, then of those that are written."""
        return (*(load.dtype for load in self.expressions.loads), *(d for own in self.targets for d in own))

    @property
    def spreads(self) -> tuple[Spread, ...]:
        """The spreads of all operands, in the order of `dtypes`."""
        written = sum(map(len, self.targets))
        return (*(load.spread for load in self.expressions.loads), *(Spread.FULL,) * written)

    @property
    def width(self) -> int:
        """The number of int64 words in the row of a segment."""
        return HEADER + WORDS * len(self.dtypes)

    @property
    def key(self) -> str:
        """A text that is equal for programs that do the same, whatever the names of their values are."""
        return "\n".join(self.body({name: f"v{i}" for i, name in enumerate(self.expressions.names)}))

    def text(self, name: str) -> str:
        """The source text of the program's Triton function, under the name `name`."""
        names: dict[str, str] = {}
        for own in self.expressions.names:
            new = re.sub(r"\W", "_", own)
            while new in TAKEN or PLACE.fullmatch(new) or keyword.iskeyword(new) or new in names.values():
                new += "_"
            names[own] = new
        options = "BLOCK: tl.constexpr, DIMS: tl.constexpr, ALIGNED: tl.constexpr"
        head = f"def {name}(row, own, numbers, first, end, {options}):"
        return "\n".join(["@triton.jit", head, *(f"    {line}" for line in self.body(names))]) + "\n"

    def body(self, names: dict[str, str]) -> list[str]:
        """The lines of the function's body, where `names` gives each value its name in the source."""
        own = self.expressions
        once, each = ["sizes = ops.sizes(row, DIMS, ALIGNED)"], []
        for i, load in enumerate(own.loads):
            stored, truth = STORED[load.dtype], " != 0" if load.dtype is torch.bool else ""
            if load.spread is Spread.ONE:
                once.append(f"{names[load.name]} = ops.load_one(own, {i}, {stored}){truth}")
                continue
            if load.spread is Spread.BLOCKS:
                once.append(f"place_{i} = ops.address(own, {i}, {stored})")
                each.append(f"{names[load.name]} = ops.load_scales(place_{i}, start, lanes, inside, {SCALED})")
                continue
            aligned = "ALIGNED" if load.spread is Spread.FULL else "False"
            once.append(f"place_{i} = ops.place(row, own, {i}, {stored}, DIMS, {aligned})")
            call = f"ops.load(place_{i}, sizes, {stored}, start, lanes, inside, DIMS, {aligned})"
            each.append(f"{names[load.name]} = {call}{truth}")
        for i, number in enumerate(own.numbers):
            once.append(f"{names[number.name]} = ops.number(numbers, {i}, {number.dtype})")
        each += [f"{names[line.name]} = {line.text.format_map(names)}" for line in own.lines]
        written = [(names[name], d) for (name, _), to in zip(own.results, self.targets, strict=True) for d in to]
        for i, (value, dtype) in enumerate(written, len(own.loads)):
            once.append(f"place_{i} = ops.place(row, own, {i}, {STORED[dtype]}, DIMS, ALIGNED)")
            each.append(f"ops.store(place_{i}, sizes, {STORED[dtype]}, {value}, start, lanes, inside, DIMS, ALIGNED)")
        return [
            *once,
            "lanes = tl.arange(0, BLOCK)",
            "for tile in tl.range(0, tl.cdiv(end - first, BLOCK).to(tl.int32)):",
            "    start = tl.multiple_of(first + tile * BLOCK, 16)",
            "    inside = ops.inside(end, start, lanes, ALIGNED)",
            *(f"    {line}" for line in each),
        ]


KernelForm = tuple[int, bool]  # number of dims after merging, and whether vector accesses are possible
FLAT: KernelForm = (1, True)


def source(title: str, programs: Sequence[PointwiseProgram], branches: Sequence[tuple[int, KernelForm]]) -> str:
    """The source text of a module that defines `kernel`.

    Args:
        branches: for each branch of the kernel, the index of its program and the form of its segments.
    """
    functions = [f"{re.sub(r'[^A-Za-z0-9_]', '_', p.name)}_{i}" for i, p in enumerate(programs)]
    parts = [PREAMBLE.format(title=title)]
    parts += [f"\n\n{p.text(f)}" for f, p in zip(functions, programs, strict=True)]
    parts.append(KERNEL)
    for number, (program, (dims, aligned)) in enumerate(branches):
        parts.append(f"    {'if' if number == 0 else 'elif'} branch == {number}:\n")
        parts.append(f"        {functions[program]}(row, own, numbers, first, end, BLOCK, {dims}, {aligned})\n")
    return "".join(parts)
