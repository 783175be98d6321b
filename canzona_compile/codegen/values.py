"""The values of generated kernels: their dtypes in memory and in arithmetic, their casts, and operands.

Kernels hold every value in its arithmetic type. 16-bit floats are held as float32 and rounded to 16 bits after every
operator, as eager ATen rounds them between its kernels. Each operator first casts its operands to their common dtype.
Hyperparameters enter in the arithmetic type without rounding, as ATen's scalars do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
from torch import fx

from canzona_compile.ir.fx_utils import is_number, recorded, tensor_value
from canzona_compile.ir.layout import Shape

# `STORED` is the type of a dtype in memory, and `HELD` its type in arithmetic. `ROUNDED` rounds held 16-bit floats.
STORED = {
    torch.float64: "tl.float64",
    torch.float32: "tl.float32",
    torch.bfloat16: "tl.bfloat16",
    torch.float16: "tl.float16",
    torch.int64: "tl.int64",
    torch.int32: "tl.int32",
    torch.int16: "tl.int16",
    torch.int8: "tl.int8",
    torch.uint8: "tl.uint8",
    torch.bool: "tl.int8",
}
ROUNDED = {torch.bfloat16: "ops.bfloat16", torch.float16: "ops.float16"}
HELD = STORED | dict.fromkeys(ROUNDED, "tl.float32") | {torch.bool: "tl.int1"}


class Unsupported(Exception):
    """No kernel can be generated for a graph. The message says why."""


class Spread(StrEnum):
    """How an operand covers the elements of a segment."""

    FULL = "full"
    PARTIAL = "partial"  # broadcast along some dims
    BLOCKS = "blocks"  # an element for each block of a row, see `ir.storage`
    ONE = "one"  # a single element


@dataclass(frozen=True, slots=True)
class LoadValue:
    """A tensor that a program reads: its name, its dtype in memory, and how it covers a segment."""

    name: str
    dtype: torch.dtype
    spread: Spread


@dataclass(frozen=True, slots=True)
class ScalarValue:
    """A number that a program reads, in one arithmetic type."""

    name: str
    source: str  # the name of the node that computes it
    dtype: str  # as Triton spells it


@dataclass(frozen=True, slots=True)
class Assignment:
    """The line `name = text`, in which {x} stands for the value named x."""

    name: str
    text: str


def check(dtype: torch.dtype) -> None:
    """Raise Unsupported if generated kernels do not support a dtype."""
    if dtype not in STORED:
        raise Unsupported(f"no kernels for {str(dtype).removeprefix('torch.')}")


def converted(text: str, source: torch.dtype, target: torch.dtype) -> str:
    """The Triton text that casts a value of dtype `source`, given as `text`, to dtype `target`."""
    if source == target:
        return text
    if target is torch.bool:
        return f"({text} != 0)"
    if HELD[source] != HELD[target]:
        text = f"{text}.to({HELD[target]})"
    return f"{ROUNDED[target]}({text})" if target in ROUNDED else text


@dataclass
class Builder:
    """Collects the lines of a program, node by node.

    Attributes:
        shape: the shape of the whole matrix.
        numbers: the numbers that it reads, by the name of their node and their arithmetic type.
    """

    shape: Shape
    loads: list[LoadValue] = field(default_factory=list)
    numbers: dict[tuple[str, str], ScalarValue] = field(default_factory=dict)
    lines: list[Assignment] = field(default_factory=list)

    def spread(self, shape: Shape) -> Spread:
        """How an operand of this shape covers the matrix."""
        if shape == self.shape:
            return Spread.FULL
        if math.prod(shape) == 1:
            return Spread.ONE
        if len(shape) == len(self.shape) and all(a in (1, b) for a, b in zip(shape, self.shape, strict=True)):
            return Spread.PARTIAL
        raise Unsupported(f"an operand of shape {list(shape)} does not lie beside fragments of {list(self.shape)}")

    # -- operands ------------------------------------------------------------------------------------

    def common(self, node: fx.Node) -> torch.dtype:
        """The dtype to which ATen casts the operands of a node, before it widens 16-bit floats to float32."""
        made = dtype_of(node)
        if made is not torch.bool:
            return made
        found = [a for a in node.args if not isinstance(a, list | tuple)]
        values = [recorded(a) if isinstance(a, fx.Node) else a for a in found]
        tensors: list[Any] = [torch.empty_like(v, device="meta") if isinstance(v, torch.Tensor) else v for v in values]
        result = tensors[0].dtype if len(tensors) == 1 else torch.result_type(*tensors[:2])
        check(result)
        return result

    def operand(self, value: Any, dtype: torch.dtype, *, round_numbers: bool = False) -> str:
        """The Triton text of an operand, cast to `dtype`.

        Args:
            dtype: the common dtype of the operator.
            round_numbers: round numbers to 16 bits if `dtype` has 16 bits.
        """
        if not is_number(value):
            return converted(f"{{{value.name}}}", dtype_of(value), dtype)
        held = HELD[dtype]
        if isinstance(value, fx.Node):
            name = value.name if held == "tl.float32" else f"{value.name}_{held.removeprefix('tl.')}"
            self.numbers.setdefault((value.name, held), ScalarValue(name, value.name, held))
            text = f"{{{name}}}"
        elif isinstance(value, int | float):
            text = f"tl.full((), {literal(value)}, {held})"
        else:
            raise Unsupported(f"an argument {value!r}")
        return f"{ROUNDED[dtype]}({text})" if round_numbers and dtype in ROUNDED else text

    def rounded(self, text: str, node: fx.Node) -> str:
        """The Triton text that rounds a result to the dtype of its node."""
        dtype = dtype_of(node)
        return f"{ROUNDED[dtype]}({text})" if dtype in ROUNDED else text


def dtype_of(node: fx.Node) -> torch.dtype:
    """The dtype of a node that stands for a tensor."""
    value = tensor_value(node)
    assert value is not None
    return value.dtype


def literal(value: float) -> str:
    """A number as source code."""
    return repr(value) if math.isfinite(value) else f'float("{value}")'
