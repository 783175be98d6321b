"""Measured facts about ATen kernels that passes rely on under exact numerics, where every bit must stay.

The facts answer two questions. May an elementwise operator run on a fragment instead of the whole tensor?
CPU kernels compute the last elements of a run (fewer than a vector) by scalar code. For some operators and
dtypes that code rounds differently, so the bits of an element depend on its position. And may n equal
matrix products run as one batched product? `tests/ir/test_bit_exactness.py` measures every line of the
tables below against torch on the machine that runs it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from canzona_compile.ir.fx_utils import tensor_value
from canzona_compile.ir.layout import Shape
from canzona_compile.ir.step import Machine

aten = torch.ops.aten

# On CPU these give an element the same bits wherever it stands, in every floating dtype. `add`, `sub`
# and `rsub` with a factor alpha do so only in 32 and 64 bits, and only if both operands have the shape of
# the result. `maximum`, `minimum` and `clamp` may return either of 0.0 and -0.0. Measurements rule out
# rsqrt in 16 bits, and pow and sigmoid in 32 and 64 bits. All other operators are not measured.
POSITION_FREE_NAMES = """
    add sub rsub mul div lerp addcmul addcdiv sqrt square neg abs sign reciprocal maximum minimum
    clamp clamp_min clamp_max where eq ne lt le gt ge copy _to_copy clone detach alias zeros_like
    ones_like full_like
"""
POSITION_FREE_ON_CPU = frozenset(
    packet for name in POSITION_FREE_NAMES.split() if (packet := getattr(aten, name, None)) is not None
)
ALIGNMENT = 64  # elements: a multiple of the step of every CPU vector loop, so that no scalar tail is left


def position_free(node: fx.Node, machine: Machine) -> bool:
    """Does a pointwise node give an element the same bits in a fragment as in the whole tensor?"""
    if machine.device != "cpu":
        return True
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.overloadpacket not in POSITION_FREE_ON_CPU:
        return False
    if target.overloadpacket in (aten.add, aten.sub, aten.rsub) and scaled(node):
        value = tensor_value(node)
        operands = [tensor_value(n) if isinstance(n, fx.Node) else None for n in node.args[:2]]
        alike = value is not None and all(v is not None and v.shape == value.shape for v in operands)
        return alike and value is not None and value.dtype.itemsize > 2
    return True


def scaled(node: fx.Node) -> bool:
    """Has an addition or subtraction a factor alpha other than 1, so that it multiplies and adds?"""
    alpha = node.args[2] if len(node.args) > 2 else node.kwargs.get("alpha", 1)
    return bool(alpha != 1)


def placed_equally(node: fx.Node, machine: Machine, aligned: bool) -> bool:
    """Does a pointwise node give a fragment the bits that it gives the whole tensor?

    Even if the position of an element matters, it does so if neither the whole tensor nor a fragment leaves
    a scalar tail (`aligned`) and every operand is contiguous. Strided operands run as scalar code, and
    broadcast ones make every row a run of its own, with its own tail.
    """
    if position_free(node, machine):
        return True
    value = tensor_value(node)
    operands = [v for n in node.all_input_nodes if (v := tensor_value(n)) is not None]
    whole = [v for v in operands if v.numel() != 1]
    return aligned and value is not None and all(v.shape == value.shape and v.is_contiguous() for v in whole)


def foreach_equal(node: fx.Node, in_place: bool) -> bool:
    """Is torch's foreach function on CPU the operator in a loop, bit for bit?

    `_foreach_mul_` by a number in 16 bits is not: it rounds the number first.
    """
    value = tensor_value(node)
    by_number = not isinstance(node.args[1], fx.Node) if len(node.args) > 1 else False
    by_number = by_number or (len(node.args) > 1 and tensor_value(node.args[1]) is None)  # type: ignore[arg-type]
    narrow = value is None or value.dtype.itemsize <= 2
    return not (in_place and narrow and by_number and node.target is aten.mul.Tensor)


def batches_equal(op: Any, dims: Shape, dtype: torch.dtype, machine: Machine) -> bool:
    """Is a batch of products [m, k] @ [k, n] bit-equal to the products one by one?

    It is on CPU with one thread in bfloat16 if m, k and n are multiples of 16: 0 of 2500 random shapes
    differed. With odd dims 3 of 750 shapes differed, in float32 about 1 in 60. On CUDA the libraries choose
    other kernels for batches.

    Args:
        op: the operator for one product.
        dims: (m, k, n).
        dtype: of the operands.
        machine: where the products run.
    """
    return (
        op in (aten.mm.default, aten.addmm.default)
        and machine.device == "cpu"
        and machine.threads == 1
        and dtype == torch.bfloat16
        and all(n % 16 == 0 for n in dims)
    )
