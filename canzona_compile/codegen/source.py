"""Write the source text of a grouped kernel.

It has one function per program, and a kernel whose blocks look up their segment and call the function of its program.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from canzona_compile.codegen.expressions import Expressions
from canzona_compile.codegen.values import STORED, Spread

HEADER, WORDS = 6, 5  # int64 words of a row before its operands, and words per operand; the same as in arithmetic.py
TAKEN = {"row", "start", "lanes", "inside", "DIMS", "ALIGNED", "tl", "ops", "triton"}

PREAMBLE = '''"""{title}"""

import triton
import triton.language as tl

from canzona_compile.codegen import arithmetic as ops
'''

KERNEL = '''

@triton.jit
def kernel(segments, rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """A block of one segment: `segments` says which, its row holds branch, first block, sizes and operands."""
    block = tl.program_id(0)
    row = rows + tl.load(segments + block).to(tl.int64) * WIDTH
    branch = tl.load(row)
    start = tl.multiple_of((block - tl.load(row + 1)) * BLOCK, 16)
    lanes = tl.arange(0, BLOCK)
'''


@dataclass(frozen=True, slots=True)
class PointwiseProgram:
    """Expressions, and the tensors to which their results are written.

    Attributes:
        name: a readable name. Programs that differ in their names only share one function.
        expressions: what the program computes.
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
        return HEADER + WORDS * len(self.dtypes) + len(self.expressions.numbers)

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
            while new in TAKEN or keyword.iskeyword(new) or new in names.values():
                new += "_"
            names[own] = new
        head = f"def {name}(row, start, lanes, inside, DIMS: tl.constexpr, ALIGNED: tl.constexpr):"
        return "\n".join(["@triton.jit", head, *(f"    {line}" for line in self.body(names))]) + "\n"

    def body(self, names: dict[str, str]) -> list[str]:
        """The lines of the function's body, where `names` gives each value its name in the source."""
        own, lines = self.expressions, []
        for i, load in enumerate(own.loads):
            stored = STORED[load.dtype]
            if load.spread is Spread.ONE:
                call = f"ops.load_one(row, {i}, {stored})"
            else:
                aligned = "ALIGNED" if load.spread is Spread.FULL else "False"
                call = f"ops.load(row, {i}, {stored}, start, lanes, inside, DIMS, {aligned})"
            lines.append(f"{names[load.name]} = {call}{' != 0' if load.dtype is torch.bool else ''}")
        for i, number in enumerate(own.numbers, HEADER + WORDS * len(self.dtypes)):
            lines.append(f"{names[number.name]} = ops.number(row, {i}, {number.dtype})")
        lines += [f"{names[line.name]} = {line.text.format_map(names)}" for line in own.lines]
        operand = len(own.loads)
        for (name, _), targets in zip(own.results, self.targets, strict=True):
            for dtype in targets:
                value = names[name]
                lines.append(
                    f"ops.store(row, {operand}, {STORED[dtype]}, {value}, start, lanes, inside, DIMS, ALIGNED)"
                )
                operand += 1
        return lines


KernelForm = tuple[int, bool]  # number of dims after merging, and whether vector accesses are possible
FLAT: KernelForm = (1, True)


def source(title: str, programs: Sequence[PointwiseProgram], branches: Sequence[tuple[int, KernelForm]]) -> str:
    """The source text of a module that defines `kernel`.

    Args:
        title: the docstring of the module.
        programs: the programs that the kernel can run.
        branches: for each branch of the kernel, the index of its program and the form of its segments.
    """
    functions = [f"{re.sub(r'[^A-Za-z0-9_]', '_', p.name)}_{i}" for i, p in enumerate(programs)]
    parts = [PREAMBLE.format(title=title)]
    parts += [f"\n\n{p.text(f)}" for f, p in zip(functions, programs, strict=True)]
    parts.append(KERNEL)
    for number, (program, (dims, aligned)) in enumerate(branches):
        parts.append(f"    {'if' if number == 0 else 'elif'} branch == {number}:\n")
        parts.append(f"        inside = ops.inside(row, start, lanes, {aligned})\n")
        parts.append(f"        {functions[program]}(row, start, lanes, inside, {dims}, {aligned})\n")
    return "".join(parts)
