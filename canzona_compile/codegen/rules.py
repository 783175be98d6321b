"""Rules that translate ATen's pointwise operators to Triton. A rule returns the text that computes a node's result.

A rule raises `Unsupported` if no text gives the bits of ATen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from canzona_compile.codegen.values import Builder, Unsupported, dtype_of
from canzona_compile.ir.fx_utils import is_number

aten = torch.ops.aten

TritonRule = Callable[[Builder, fx.Node], str]


def argument(node: fx.Node, place: int, name: str, default: Any) -> Any:
    """An argument of a call, given by position or by name, or else its default."""
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)


def formula(template: str, *, integers: bool = True) -> TritonRule:
    """A rule that casts all arguments to their common dtype and puts them at {0}, {1}, ... of a template."""

    def rule(b: Builder, node: fx.Node) -> str:
        dtype = b.common(node)
        if dtype is torch.bool or not (integers or dtype.is_floating_point):
            raise Unsupported(f"{node.target} of {dtype}")
        if node.kwargs:
            raise Unsupported(f"{node.target} with {', '.join(node.kwargs)}")
        return b.rounded(template.format(*(b.operand(a, dtype) for a in node.args)), node)

    return rule


def floats(template: str) -> TritonRule:
    """The rule `same` for floating-point dtypes only."""
    return formula(template, integers=False)


def sums(sign: str, *, reversed_: bool = False) -> TritonRule:
    """The rule for x + alpha * y or x - alpha * y, by `sign`. If `reversed_`, x is the second argument."""

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


def compares(sign: str) -> TritonRule:
    """The rule for a comparison."""

    def rule(b: Builder, node: fx.Node) -> str:
        dtype = b.common(node)
        x, y = (b.operand(a, dtype, round_numbers=True) for a in node.args[:2])
        return f"{x} {sign} {y}"

    return rule


def div(b: Builder, node: fx.Node) -> str:
    """The rule for true division."""
    dtype = b.common(node)
    if node.kwargs.get("rounding_mode") is not None or len(node.args) > 2:
        raise Unsupported(f"{node.target} with a rounding mode")
    x, y = (b.operand(a, dtype) for a in node.args)
    return b.rounded(f"ops.{'div_by_number' if is_number(node.args[1]) else 'div'}({x}, {y})", node)


def fused(name: str) -> TritonRule:
    """The rule for addcmul or addcdiv."""

    def rule(b: Builder, node: fx.Node) -> str:
        dtype = b.common(node)
        if not dtype.is_floating_point:
            raise Unsupported(f"{node.target} of {dtype}")
        x, y, z = (b.operand(a, dtype) for a in node.args[:3])
        return b.rounded(f"ops.{name}({x}, {y}, {z}, {b.operand(argument(node, 3, 'value', 1), dtype)})", node)

    return rule


def power(b: Builder, node: fx.Node) -> str:
    """The rule for powers. ATen has special code for some exponents; in 16 bits it rounds after each product."""
    dtype = b.common(node)
    if not dtype.is_floating_point:
        raise Unsupported(f"{node.target} of {dtype}")
    exponent = node.args[1]
    x = b.operand(node.args[0], dtype, round_numbers=True)
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
    """The rule for clamp with a minimum, a maximum or both."""
    dtype = b.common(node)
    text = b.operand(node.args[0], dtype)
    for place, name, function in ((1, "min", "maximum"), (2, "max", "minimum")):
        bound = argument(node, place, name, None)
        if bound is not None:
            text = f"ops.{function}({text}, {b.operand(bound, dtype)})"
    return b.rounded(text, node)


def where(b: Builder, node: fx.Node) -> str:
    """The rule for where with three arguments."""
    if len(node.args) != 3:
        raise Unsupported(f"{node.target} without values")
    dtype = dtype_of(node)
    condition, x, y = node.args
    chosen = b.operand(condition, torch.bool)
    return f"tl.where({chosen}, {b.operand(x, dtype, round_numbers=True)}, {b.operand(y, dtype, round_numbers=True)})"


def copy(b: Builder, node: fx.Node) -> str:
    """The rule for casts and copies of the first argument."""
    return b.operand(node.args[0], dtype_of(node))


def overwrite(b: Builder, node: fx.Node) -> str:
    """The rule for operators whose result is the second argument, cast to the dtype of the first one."""
    return b.operand(node.args[1], dtype_of(node), round_numbers=True)


def constant(value: float | None) -> TritonRule:
    """The rule for a tensor filled with `value`. If it is None, the number is the last of one or two arguments."""

    def rule(b: Builder, node: fx.Node) -> str:
        given = (node.args[0] if len(node.args) == 1 else node.args[1]) if value is None else value
        dtype = dtype_of(node)
        if dtype is torch.bool:
            raise Unsupported(f"{node.target} of bool")
        return b.operand(given, dtype, round_numbers=True)

    return rule


def logical(template: str) -> TritonRule:
    """A rule that casts all arguments to bool and puts them at {0}, {1}, ... of a template."""

    def rule(b: Builder, node: fx.Node) -> str:
        if dtype_of(node) is not torch.bool:
            raise Unsupported(f"{node.target} of {dtype_of(node)}")
        return template.format(*(b.operand(a, torch.bool) for a in node.args))

    return rule


RULES: dict[Any, TritonRule] = {
    aten.add: sums("+"),
    aten.sub: sums("-"),
    aten.rsub: sums("-", reversed_=True),
    aten.mul: formula("{0} * {1}"),
    aten.div: div,
    aten.neg: formula("-{0}"),
    aten.abs: formula("tl.abs({0})"),
    aten.sign: formula("ops.sign({0})"),
    aten.square: formula("{0} * {0}"),
    aten.maximum: formula("ops.maximum({0}, {1})"),
    aten.minimum: formula("ops.minimum({0}, {1})"),
    aten.clamp: clamp,
    aten.clamp_min: formula("ops.maximum({0}, {1})"),
    aten.clamp_max: formula("ops.minimum({0}, {1})"),
    aten.relu: floats("ops.maximum({0}, 0.0)"),
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
    aten.sqrt: floats("ops.sqrt({0})"),
    aten.rsqrt: floats("ops.rsqrt({0})"),
    aten.reciprocal: floats("ops.reciprocal({0})"),
    aten.exp: floats("ops.exp({0})"),
    aten.exp2: floats("ops.exp2({0})"),
    aten.log: floats("ops.log({0})"),
    aten.log2: floats("ops.log2({0})"),
    aten.sin: floats("ops.sin({0})"),
    aten.cos: floats("ops.cos({0})"),
    aten.erf: floats("ops.erf({0})"),
    aten.tanh: floats("ops.tanh({0})"),
    aten.sigmoid: floats("ops.sigmoid({0})"),
    aten.floor: floats("tl.floor({0})"),
    aten.ceil: floats("tl.ceil({0})"),
}
