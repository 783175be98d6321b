"""Pointwise FX graphs as lines of Triton, operator by operator with the dtypes that ATen gave them.

A value is held in its arithmetic type: 16-bit floats as float32, rounded to 16 bits after every operator, which is what
eager ATen does between its kernels. Operands are first brought to the operator's common dtype; hyperparameters take
part in the arithmetic type, unrounded, as ATen's scalars do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
from torch import fx

from canzona_compile.ir import outputs, tensor_value
from canzona_compile.layout import Shape

aten = torch.ops.aten

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
class Load:
    name: str
    dtype: torch.dtype
    spread: Spread


@dataclass(frozen=True, slots=True)
class Number:
    """A number-valued node of the graph, in one arithmetic type."""

    name: str
    source: str  # the node
    dtype: str


@dataclass(frozen=True, slots=True)
class Line:
    """`name` = `text`, where {x} is the value named x."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Expressions:
    """A pointwise graph.

    Attributes:
        loads: tensors read, by the graph's names for them.
        numbers: numbers read.
        lines: one per operator, in order.
        results: the wanted results: the value's name, and the dtype that it is rounded to.
    """

    loads: tuple[Load, ...]
    numbers: tuple[Number, ...]
    lines: tuple[Line, ...]
    results: tuple[tuple[str, torch.dtype], ...]


def copying(source: torch.dtype, target: torch.dtype) -> Expressions:
    """Copy and cast.

    Raises:
        Unsupported: for complex numbers and the like.
    """
    for dtype in (source, target):
        check(dtype)
    lines = () if source == target else (Line("result", converted("{value}", source, target)),)
    return Expressions((Load("value", source, Spread.FULL),), (), lines, ((lines[0].name if lines else "value", target),))


def expressions(graph: fx.Graph, wanted: Sequence[int], shape: Shape) -> Expressions:
    """The results number `wanted` of a graph whose values have `shape` or broadcast to it.

    Raises:
        Unsupported: if a node is not pointwise, or has no Triton spelling with ATen's bits.
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
            builder.add(node)
    return Expressions(
        tuple(builder.loads),
        tuple(builder.numbers.values()),
        tuple(builder.lines),
        tuple((node.name, dtype) for node, dtype in results),
    )


def ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Nodes, and all that they are made of."""
    found: set[fx.Node] = set()
    todo = list(nodes)
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += node.all_input_nodes
    return found


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
    loads: list[Load] = field(default_factory=list)
    numbers: dict[tuple[str, str], Number] = field(default_factory=dict)
    lines: list[Line] = field(default_factory=list)

    def add(self, node: fx.Node) -> None:
        value = tensor_value(node)
        if value is None:
            return  # computed on the host
        check(value.dtype)
        if node.op == "placeholder":
            self.loads.append(Load(node.name, value.dtype, self.spread(tuple(value.shape))))
            return
        target = node.target
        rule = RULES.get(target.overloadpacket) if isinstance(target, torch._ops.OpOverload) else None
        if rule is None:
            raise Unsupported(f"{target} has no Triton spelling")
        self.lines.append(Line(node.name, rule(self, node)))

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
            self.numbers.setdefault((value.name, held), Number(name, value.name, held))
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


# -- operators ---------------------------------------------------------------------------------------

Rule = Callable[[Builder, fx.Node], str]


def argument(node: fx.Node, place: int, name: str, default: Any) -> Any:
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)


def same(template: str, *, integers: bool = True) -> Rule:
    """All tensor arguments in the common dtype, at {0}, {1}, ... of the template."""

    def rule(b: Builder, node: fx.Node) -> str:
        dtype = b.common(node)
        if dtype is torch.bool or not (integers or dtype.is_floating_point):
            raise Unsupported(f"{node.target} of {dtype}")
        if node.kwargs:
            raise Unsupported(f"{node.target} with {', '.join(node.kwargs)}")
        return b.rounded(template.format(*(b.operand(a, dtype) for a in node.args)), node)

    return rule


def floats(template: str) -> Rule:
    return same(template, integers=False)


def sums(sign: str, *, reversed_: bool = False) -> Rule:
    """x + alpha y, x - alpha y, and y - alpha x."""

    def rule(b: Builder, node: fx.Node) -> str:
        dtype = b.common(node)
        if dtype is torch.bool:
            raise Unsupported(f"{node.target} of bool")
        pair = node.args[1::-1] if reversed_ else node.args[:2]
        x, y = (b.operand(a, dtype) for a in pair)
        alpha = argument(node, 2, "alpha", 1)
        if not isinstance(alpha, fx.Node) and alpha == 1:
            return b.rounded(f"{x} {sign} {y}", node)
        factor = b.operand(alpha, dtype)
        if not dtype.is_floating_point:
            return f"{x} {sign} {factor} * {y}"
        function = {torch.bfloat16: "ops.fma_bfloat16", torch.float16: "ops.fma_float16"}.get(dtype, "ops.fma")
        return b.rounded(f"{function}({'-' if sign == '-' else ''}{factor}, {y}, {x})", node)

    return rule


def compares(sign: str) -> Rule:
    def rule(b: Builder, node: fx.Node) -> str:
        dtype = b.common(node)
        x, y = (b.operand(a, dtype, round_numbers=True) for a in node.args[:2])
        return f"{x} {sign} {y}"

    return rule


def div(b: Builder, node: fx.Node) -> str:
    dtype = b.common(node)
    if node.kwargs.get("rounding_mode") is not None or len(node.args) > 2:
        raise Unsupported(f"{node.target} with a rounding mode")
    x, y = (b.operand(a, dtype) for a in node.args)
    return b.rounded(f"ops.{'div_by_number' if is_number(node.args[1]) else 'div'}({x}, {y})", node)


def fused(name: str) -> Rule:
    """addcmul and addcdiv."""

    def rule(b: Builder, node: fx.Node) -> str:
        dtype = b.common(node)
        if not dtype.is_floating_point:
            raise Unsupported(f"{node.target} of {dtype}")
        x, y, z = (b.operand(a, dtype) for a in node.args[:3])
        return b.rounded(f"ops.{name}({x}, {y}, {z}, {b.operand(argument(node, 3, 'value', 1), dtype)})", node)

    return rule


def power(b: Builder, node: fx.Node) -> str:
    """ATen has code of its own for some exponents; in 16 bits each product of theirs is rounded."""
    dtype = b.common(node)
    if not dtype.is_floating_point:
        raise Unsupported(f"{node.target} of {dtype}")
    exponent = node.args[1]
    x = b.operand(node.args[0], dtype)
    if isinstance(exponent, fx.Node):
        if is_number(exponent):
            raise Unsupported("a power whose exponent is a hyperparameter")
        return b.rounded(f"ops.power({x}, {b.operand(exponent, dtype)})", node)
    if is_number(node.args[0]):
        raise Unsupported(f"{node.target} of a number")
    square = b.rounded(f"{x} * {x}", node)
    special = {
        1: x,
        2: square,
        3: b.rounded(f"{square} * {x}", node),
        0.5: b.rounded(f"ops.sqrt({x})", node),
        -0.5: b.rounded(f"ops.rsqrt({x})", node),
        -1: b.rounded(f"ops.reciprocal({x})", node),
        -2: b.rounded(f"ops.reciprocal({square})", node),
    }
    general = f"ops.power({x}, {b.operand(exponent, dtype, round_numbers=True)})"
    return special[exponent] if exponent in special else b.rounded(general, node)  # type: ignore[index]


def clamp(b: Builder, node: fx.Node) -> str:
    dtype = b.common(node)
    text = b.operand(node.args[0], dtype)
    for place, name, function in ((1, "min", "maximum"), (2, "max", "minimum")):
        bound = argument(node, place, name, None)
        if bound is not None:
            text = f"ops.{function}({text}, {b.operand(bound, dtype)})"
    return b.rounded(text, node)


def where(b: Builder, node: fx.Node) -> str:
    if len(node.args) != 3:
        raise Unsupported(f"{node.target} without values")
    dtype = dtype_of(node)
    condition, x, y = node.args
    chosen = b.operand(condition, torch.bool)
    return f"tl.where({chosen}, {b.operand(x, dtype, round_numbers=True)}, {b.operand(y, dtype, round_numbers=True)})"


def copy(b: Builder, node: fx.Node) -> str:
    return b.operand(node.args[0], dtype_of(node))


def overwrite(b: Builder, node: fx.Node) -> str:
    return b.operand(node.args[1], dtype_of(node), round_numbers=True)


def constant(value: float | None) -> Rule:
    """A tensor of one number; None: of the second argument."""

    def rule(b: Builder, node: fx.Node) -> str:
        given = (node.args[0] if len(node.args) == 1 else node.args[1]) if value is None else value
        dtype = dtype_of(node)
        if dtype is torch.bool:
            raise Unsupported(f"{node.target} of bool")
        return b.operand(given, dtype, round_numbers=True)

    return rule


def logical(template: str) -> Rule:
    def rule(b: Builder, node: fx.Node) -> str:
        if dtype_of(node) is not torch.bool:
            raise Unsupported(f"{node.target} of {dtype_of(node)}")
        return template.format(*(b.operand(a, torch.bool) for a in node.args))

    return rule


RULES: dict[Any, Rule] = {
    aten.add: sums("+"),
    aten.sub: sums("-"),
    aten.rsub: sums("-", reversed_=True),
    aten.mul: same("{0} * {1}"),
    aten.div: div,
    aten.neg: same("-{0}"),
    aten.abs: same("tl.abs({0})"),
    aten.sign: same("ops.sign({0})"),
    aten.square: same("{0} * {0}"),
    aten.maximum: same("ops.maximum({0}, {1})"),
    aten.minimum: same("ops.minimum({0}, {1})"),
    aten.clamp: clamp,
    aten.clamp_min: same("ops.maximum({0}, {1})"),
    aten.clamp_max: same("ops.minimum({0}, {1})"),
    aten.relu: same("ops.maximum({0}, 0.0)", integers=False),
    aten.lerp: floats("ops.lerp({0}, {1}, {2})"),
    aten.addcmul: fused("addcmul"),
    aten.addcdiv: fused("addcdiv"),
    aten.pow: power,
    aten.where: where,
    aten._to_copy: copy,
    aten.clone: copy,
    aten.detach: copy,
    aten.alias: copy,
    aten.lift_fresh_copy: copy,
    aten.copy: overwrite,
    aten.fill: overwrite,
    aten.zeros_like: constant(0),
    aten.ones_like: constant(1),
    aten.full_like: constant(None),
    aten.full: constant(None),
    aten.scalar_tensor: constant(None),
    aten.eq: compares("=="),
    aten.ne: compares("!="),
    aten.lt: compares("<"),
    aten.le: compares("<="),
    aten.gt: compares(">"),
    aten.ge: compares(">="),
    aten.logical_and: logical("{0} & {1}"),
    aten.logical_or: logical("{0} | {1}"),
    aten.logical_not: logical("{0} == 0"),
    **{
        getattr(aten, name): floats(f"ops.{name}({{0}})")
        for name in "sqrt rsqrt reciprocal exp exp2 log log2 sin cos erf tanh sigmoid".split()
    },
    aten.floor: floats("tl.floor({0})"),
    aten.ceil: floats("tl.ceil({0})"),
}
