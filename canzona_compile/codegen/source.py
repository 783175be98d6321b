"""The text of a grouped kernel: one function per program, and the kernel that finds a block's segment and program."""

from __future__ import annotations

import keyword
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from canzona_compile.codegen.expressions import Expressions
from canzona_compile.codegen.values import STORED, Spread

HEADER, WORDS = 6, 5  # as in arithmetic.py: words of a row before its operands, and per operand
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
    """Expressions, and where their results go.

    Attributes:
        name: for people; equal programs of other names share one function.
        targets: per result, the dtype of each tensor that it is written to.
    """

    name: str
    expressions: Expressions
    targets: tuple[tuple[torch.dtype, ...], ...]

    @property
    def reads(self) -> int:
        """How many tensors are read; those that are written follow them among the operands."""
        return len(self.expressions.loads)

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Of all operands, tensors read before tensors written."""
        return (*(load.dtype for load in self.expressions.loads), *(d for own in self.targets for d in own))

    @property
    def spreads(self) -> tuple[Spread, ...]:
        written = sum(map(len, self.targets))
        return (*(load.spread for load in self.expressions.loads), *(Spread.FULL,) * written)

    @property
    def width(self) -> int:
        """Words of a segment's row."""
        return HEADER + WORDS * len(self.dtypes) + len(self.expressions.numbers)

    @property
    def key(self) -> str:
        """Equal for programs that do the same, whatever their values are called."""
        return "\n".join(self.body({name: f"v{i}" for i, name in enumerate(self._names())}))

    def _names(self) -> list[str]:
        own = self.expressions
        return [*(x.name for x in own.loads), *(x.name for x in own.numbers), *(x.name for x in own.lines)]

    def text(self, name: str) -> str:
        """The function in source code."""
        names: dict[str, str] = {}
        for own in self._names():
            new = re.sub(r"\W", "_", own)
            while new in TAKEN or keyword.iskeyword(new) or new in names.values():
                new += "_"
            names[own] = new
        head = f"def {name}(row, start, lanes, inside, DIMS: tl.constexpr, ALIGNED: tl.constexpr):"
        return "\n".join(["@triton.jit", head, *(f"    {line}" for line in self.body(names))]) + "\n"

    def body(self, names: dict[str, str]) -> list[str]:
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


KernelForm = tuple[int, bool]  # dims that are left after merging, and whether all of it may be accessed in vectors
FLAT: KernelForm = (1, True)


def source(title: str, programs: Sequence[PointwiseProgram], branches: Sequence[tuple[int, KernelForm]]) -> str:
    """The text of a module with `kernel`, whose branch number b runs program branches[b][0] in form branches[b][1]."""
    functions = [f"{re.sub(r'[^A-Za-z0-9_]', '_', p.name)}_{i}" for i, p in enumerate(programs)]
    parts = [PREAMBLE.format(title=title)]
    parts += [f"\n\n{p.text(f)}" for f, p in zip(functions, programs, strict=True)]
    parts.append(KERNEL)
    for number, (program, (dims, aligned)) in enumerate(branches):
        parts.append(f"    {'if' if number == 0 else 'elif'} branch == {number}:\n")
        parts.append(f"        inside = ops.inside(row, start, lanes, {aligned})\n")
        parts.append(f"        {functions[program]}(row, start, lanes, inside, {dims}, {aligned})\n")
    return "".join(parts)
