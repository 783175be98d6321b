"""Write the source text of a grouped kernel.

It has one function per pointwise program, and a kernel. Each block of the kernel looks up its segment, and the function
of the segment's program computes the block's tiles, one after another. What all of them need is loaded before: where
the segment lies, and its numbers. Those loads wait for one another, too long for the work of one tile.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from canzona_compile.codegen.expressions import Expressions
from canzona_compile.codegen.values import STORED, Spread

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
        return "\n".join(self.body({name: f"v{i}" for i, name in enumerate(self._names())}))

    def _names(self) -> list[str]:
        own = self.expressions
        return [*(x.name for x in own.loads), *(x.name for x in own.numbers), *(x.name for x in own.lines)]

    def text(self, name: str) -> str:
        """The source text of the program's Triton function, under the name `name`."""
        names: dict[str, str] = {}
        for own in self._names():
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
