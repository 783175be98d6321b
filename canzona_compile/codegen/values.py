"""Values of generated kernels: their dtypes in memory and in arithmetic, casts, operands.

A value is held in its arithmetic type: 16-bit floats as float32, rounded to 16 bits after every operator, which is what
eager ATen does between its kernels. Operands are first brought to the operator's common dtype; hyperparameters take
part in the arithmetic type, unrounded, as ATen's scalars do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
from torch import fx

from canzona_compile.ir.fx_utils import tensor_value
from canzona_compile.ir.layout import Shape

# In memory, and in arithmetic.
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
    """A graph, or a part of it, that no kernel is generated for; says why."""


class Spread(StrEnum):
    """How an operand covers the elements of a segment."""

    FULL = "full"
    PARTIAL = "partial"  # broadcast along some dims
    ONE = "one"  # a single element


@dataclass(frozen=True, slots=True)
class LoadValue:
    name: str
    dtype: torch.dtype
    spread: Spread


@dataclass(frozen=True, slots=True)
class ScalarValue:
    """A number-valued node of the graph, in one arithmetic type."""

    name: str
    source: str  # the node
    dtype: str


@dataclass(frozen=True, slots=True)
class Assignment:
    """`name` = `text`, where {x} is the value named x."""

    name: str
    text: str


def check(dtype: torch.dtype) -> None:
    if dtype not in STORED:
        raise Unsupported(f"no kernels for {str(dtype).removeprefix('torch.')}")


def converted(text: str, source: torch.dtype, target: torch.dtype) -> str:
    """A value of dtype `source` as one of `target`, in the arithmetic type of that."""
    if source == target:
        return text
    if target is torch.bool:
        return f"({text} != 0)"
    if HELD[source] != HELD[target]:
        text = f"{text}.to({HELD[target]})"
    return f"{ROUNDED[target]}({text})" if target in ROUNDED else text


@dataclass
class Builder:
    """Collects lines, node by node."""

    shape: Shape
    loads: list[LoadValue] = field(default_factory=list)
    numbers: dict[tuple[str, str], ScalarValue] = field(default_factory=dict)
    lines: list[Assignment] = field(default_factory=list)

    def spread(self, shape: Shape) -> Spread:
        if shape == self.shape:
            return Spread.FULL
        if math.prod(shape) == 1:
            return Spread.ONE
        if len(shape) == len(self.shape) and all(a in (1, b) for a, b in zip(shape, self.shape, strict=True)):
            return Spread.PARTIAL
        raise Unsupported(f"an operand of shape {list(shape)} does not lie beside fragments of {list(self.shape)}")

    # -- operands ------------------------------------------------------------------------------------

    def common(self, node: fx.Node) -> torch.dtype:
        """The dtype that ATen computes in, before it widens 16 bits."""
        made = dtype_of(node)
        if made is not torch.bool:
            return made
        found = [a for a in node.args if not isinstance(a, list | tuple)]
        values = [a.meta["val"] if isinstance(a, fx.Node) else a for a in found]
        tensors = [torch.empty_like(v, device="meta") if isinstance(v, torch.Tensor) else plain(v) for v in values]
        result = tensors[0].dtype if len(tensors) == 1 else torch.result_type(*tensors[:2])
        check(result)
        return result

    def operand(self, value: Any, dtype: torch.dtype, *, round_numbers: bool = False) -> str:
        """A tensor or a number as a value of `dtype`."""
        if isinstance(value, fx.Node) and tensor_value(value) is not None:
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
        dtype = dtype_of(node)
        return f"{ROUNDED[dtype]}({text})" if dtype in ROUNDED else text


def dtype_of(node: fx.Node) -> torch.dtype:
    value = tensor_value(node)
    assert value is not None
    return value.dtype


def plain(value: Any) -> Any:
    """A number of the kind of a symbolic one, for type promotion."""
    if isinstance(value, bool | torch.SymBool):
        return True
    return 1.0 if isinstance(value, float | torch.SymFloat) else 1


def literal(value: float) -> str:
    """A number as source code."""
    return repr(value) if math.isfinite(value) else f'float("{value}")'


def is_number(value: Any) -> bool:
    return not (isinstance(value, fx.Node) and tensor_value(value) is not None)
