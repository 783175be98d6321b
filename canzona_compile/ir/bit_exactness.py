"""Measured facts about ATen kernels. Passes rely on them under exact numerics, where every bit must stay.

The facts answer these questions:

- May an elementwise operator run on a fragment instead of the whole tensor? A CPU kernel computes the last elements of
  a run, fewer than a vector, by scalar code. For some operators and dtypes that code rounds differently. Then the bits
  of an element depend on its position.
- May n equal matrix products run as one batched product, or n reductions of equal matrices as one of a stack?

`tests/ir/test_bit_exactness.py` measures every line of the tables below against torch, on the machine that runs it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from canzona_compile.compat.torch_private import OpOverload
from canzona_compile.ir.fx_utils import is_number, tensor_value
from canzona_compile.ir.layout import Shape
from canzona_compile.machine.hardware import Machine

aten = torch.ops.aten

# On CPU these operators give an element the same bits at every position, in every floating dtype. There are two
# exceptions. `add`, `sub` and `rsub` with a factor alpha do so only in 32 and 64 bits, and only if both operands have
# the shape of the result. `maximum`, `minimum` and `clamp` may return either of 0.0 and -0.0. Measurements rule out
# rsqrt in 16 bits, and pow and sigmoid in 32 and 64 bits. All other operators are not measured.
POSITION_FREE_NAMES = """
    add sub rsub mul div lerp addcmul addcdiv sqrt square neg abs sign reciprocal maximum minimum
    clamp clamp_min clamp_max where eq ne lt le gt ge copy _to_copy clone detach alias zeros_like
    ones_like full_like
"""
POSITION_FREE_ON_CPU = frozenset(
    packet for name in POSITION_FREE_NAMES.split() if (packet := getattr(aten, name, None)) is not None
)
SMALLEST_OF_ONEDNN = 16**3  # m * k * n up to which torch multiplies two 16-bit matrices by a loop of its own


def position_free(node: fx.Node, machine: Machine) -> bool:
    """Whether a pointwise node gives an element the same bits at every position."""
    if machine.device != "cpu":
        return True
    target = node.target
    if not isinstance(target, OpOverload) or target.overloadpacket not in POSITION_FREE_ON_CPU:
        return False
    if target.overloadpacket in (aten.add, aten.sub, aten.rsub) and scaled(node):
        value = tensor_value(node)
        operands = [tensor_value(n) if isinstance(n, fx.Node) else None for n in node.args[:2]]
        alike = value is not None and all(v is not None and v.shape == value.shape for v in operands)
        return alike and value is not None and value.dtype.itemsize > 2
    return True


def scaled(node: fx.Node) -> bool:
    """Whether an addition or subtraction has a factor alpha other than 1, so that it multiplies and adds."""
    alpha = node.args[2] if len(node.args) > 2 else node.kwargs.get("alpha", 1)
    return bool(alpha != 1)


def placed_equally(node: fx.Node, machine: Machine, aligned: bool) -> bool:
    """Whether a pointwise node gives a fragment the bits that it gives the whole tensor.

    If the position of an element matters, it still does so if there is no scalar tail and every operand is contiguous.
    Strided operands run as scalar code. Broadcast operands make every row a run of its own, with its own tail.

    Args:
        aligned: whether the sizes of the whole tensor and of all fragments are multiples of `WHOLE_VECTORS`.
    """
    if position_free(node, machine):
        return True
    value = tensor_value(node)
    operands = [v for n in node.all_input_nodes if (v := tensor_value(n)) is not None]
    whole = [v for v in operands if v.numel() != 1]
    return aligned and value is not None and all(v.shape == value.shape and v.is_contiguous() for v in whole)


def foreach_equal(node: fx.Node, in_place: bool) -> bool:
    """Whether torch's foreach function on CPU gives the bits of the operator in a loop.

    `_foreach_mul_` by a number in 16 bits does not, because it rounds the number first.
    """
    value = tensor_value(node)
    by_number = len(node.args) > 1 and is_number(node.args[1])
    narrow = value is None or value.dtype.itemsize <= 2
    return not (in_place and narrow and by_number and node.target is aten.mul.Tensor)


def batches_equal(op: Any, dims: Shape, dtype: torch.dtype, machine: Machine) -> bool:
    """Whether a batch of products [m, k] @ [k, n] has the bits of the products one by one.

    It has on CPU with one thread, in bfloat16, if m, k and n are multiples of 16 and not all of them 16: none of 2500
    random shapes differed. Operands must lie in a batch as they lie alone, see `program_ops.stack`: 47 of 1200 products
    of transposed matrices had other bits in a contiguous batch. Torch leaves a batch of products of 16 x 16 x 16 to
    oneDNN and a single one not (`checksize` in ATen's LinearAlgebra.cpp), and 1 to 3 of 1000 draws differed. With odd
    dims 3 of 750 shapes differed, and in float32 about 1 of 60. On CUDA the libraries choose other kernels for batches.

    Args:
        dtype: the dtype of the operands.
    """
    return (
        op in (aten.mm.default, aten.addmm.default)
        and machine.device == "cpu"
        and machine.threads == 1
        and dtype == torch.bfloat16
        and all(n % 16 == 0 for n in dims)
        and math.prod(dims) > SMALLEST_OF_ONEDNN
    )


def reductions_equal(machine: Machine) -> bool:
    """Whether sums, means and norms over dims of each matrix of a stack have the bits of those of the matrix alone.

    They have on CPU with one thread, of row-major and of transposed matrices: none of 14,000 differed. Several threads
    share one large reduction, but not those of a stack. CUDA promises no bits of a sum, so there is nothing to lose.
    """
    return machine.device == "cuda" or (machine.device == "cpu" and machine.threads == 1)
