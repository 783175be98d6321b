"""Numbers that lie in 0-d tensors, and forms of ATen's operators that take such numbers.

The forms round as ATen's CUDA kernels round when they take Python numbers. They compute in 32 bits where tensors
have 16 bits, and they round a product and its sum once.

In the functions below a number is a Python number or a `DeviceNumber`. Results have the dtype that ATen gives them.
Forms of operators that write in place write their result to the first tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from canzona_compile.codegen.step_words import StepWords
from canzona_compile.ir import program_ops
from canzona_compile.kernels import gemm_axpby as axpby_kernel
from canzona_compile.kernels import sym_gemm as sym_kernel
from canzona_compile.kernels.ops import GEMM_AXPBY, SYM_GEMM

aten = torch.ops.aten


class DeviceNumber:
    """A number in two 0-d tensors on a device, one float32 and one float64, each in a word of its own.

    Args:
        words: the words.
        first: the first of the two words.

    Attributes:
        single: the float32 tensor.
        double: the float64 tensor.
    """

    WORDS = 2

    def __init__(self, words: StepWords, first: int) -> None:
        self.double = words.memory[first : first + 1].view(torch.float64)[0]
        self.single = words.memory[first + 1 : first + 2].view(torch.float32)[0]
        self._double = words.wanted[first : first + 1].view(np.float64)
        self._single = words.wanted[first + 1 : first + 2].view(np.float32)[:1]

    def fill(self, value: float) -> None:
        """Let both tensors have a value once the words are sent."""
        self._double[0] = value
        with np.errstate(over="ignore"):
            self._single[0] = value

    def beside(self, tensor: Tensor) -> Tensor:
        """Return the 0-d tensor whose precision fits arithmetic with `tensor`: float64 for float64, else float32."""
        return self.double if tensor.dtype == torch.float64 else self.single


def wide(tensor: Tensor) -> Tensor:
    """Convert a tensor to the precision in which ATen computes: float64 stays, all others become float32."""
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


def operand(value: Any, tensor: Tensor) -> Any:
    """Return what arithmetic with `tensor` takes for `value`: a 0-d tensor for a `DeviceNumber`, a wide tensor for a
    tensor, and a Python number as it is."""
    if isinstance(value, DeviceNumber):
        return value.beside(tensor)
    return wide(value) if isinstance(value, Tensor) else value


def result_dtype(*values: Any) -> torch.dtype:
    """Return the dtype of the result of an operator on these values. Only tensors among them count."""
    tensors = [v for v in values if isinstance(v, Tensor)]
    found = tensors[0].dtype
    for tensor in tensors[1:]:
        found = torch.promote_types(found, tensor.dtype)
    return found if found.is_floating_point else torch.get_default_dtype()


def tensor_among(*values: Any) -> Tensor:
    """Return the first tensor among some values."""
    return next(v for v in values if isinstance(v, Tensor))


def mul(x: Any, y: Any) -> Tensor:
    """Return x * y. Either operand may be a number."""
    like = tensor_among(x, y)
    return torch.mul(operand(x, like), operand(y, like)).to(result_dtype(x, y))


def div(x: Any, y: Any) -> Tensor:
    """Return x / y. To divide by a number, this multiplies with its reciprocal on CUDA, as ATen's kernel does."""
    like = tensor_among(x, y)
    a, b = operand(x, like), operand(y, like)
    by_reciprocal = isinstance(y, DeviceNumber) and like.is_cuda
    return (torch.mul(a, b.reciprocal()) if by_reciprocal else torch.div(a, b)).to(result_dtype(x, y))


def add(x: Any, y: Any, *, alpha: Any = 1) -> Tensor:
    """Return x + alpha * y, with one rounding on CUDA."""
    return scaled_sum(x, y, alpha, 1)


def sub(x: Any, y: Any, *, alpha: Any = 1) -> Tensor:
    """Return x - alpha * y, with one rounding on CUDA."""
    return scaled_sum(x, y, alpha, -1)


def scaled_sum(x: Any, y: Any, alpha: Any, sign: int) -> Tensor:
    """Return x + sign * alpha * y, where `sign` is 1 or -1."""
    like = tensor_among(x, y)
    a, b = operand(x, like), operand(y, like)
    if isinstance(alpha, DeviceNumber):
        # With a value of 1 the product is not rounded by itself.
        factor = alpha.beside(like)
        total = torch.addcmul(a, b, factor if sign > 0 else -factor)
    else:
        total = torch.add(a, b, alpha=sign * alpha)
    return total.to(result_dtype(x, y))


def lerp(x: Tensor, end: Tensor, weight: Any) -> Tensor:
    """Return x + weight * (end - x), computed as ATen computes it."""
    return torch.lerp(wide(x), wide(end), operand(weight, x)).to(result_dtype(x, end))


def addcmul(x: Tensor, a: Tensor, b: Tensor, *, value: Any = 1) -> Tensor:
    """Return x + value * a * b. The product a * b is rounded first, as in ATen's CUDA kernel."""
    return torch.addcmul(wide(x), torch.mul(wide(a), wide(b)), operand(value, x)).to(result_dtype(x, a, b))


def addcdiv(x: Tensor, a: Tensor, b: Tensor, *, value: Any = 1) -> Tensor:
    """Return x + value * a / b."""
    quotient, factor = torch.div(wide(a), wide(b)), operand(value, x)
    if isinstance(value, DeviceNumber):
        total = torch.addcmul(wide(x), quotient, factor)
    else:
        total = torch.add(wide(x), quotient, alpha=factor)
    return total.to(result_dtype(x, a, b))


def sym_gemm(
    a: Tensor,
    b: Tensor | None = None,
    c: Tensor | None = None,
    *,
    alpha: Any = 1.0,
    beta: Any = 0.0,
    diag: Any = 0.0,
    trans: bool = False,
) -> Tensor:
    """Compute `canzona::sym_gemm` with numbers that may be device numbers.

    The schema of the operator takes Python numbers only, so this calls the kernels directly.
    """
    first, second, third = (operand(number, a) for number in (alpha, beta, diag))
    return sym_kernel.sym_gemm(a, b, c, alpha=first, beta=second, diag=third, trans=trans)


def gemm_axpby(factor: Tensor, x: Tensor, *, alpha: Any = 1.0, beta: Any = 1.0, right: bool = False) -> Tensor:
    """Compute `canzona::gemm_axpby` with numbers that may be device numbers, as `sym_gemm` above does."""
    return axpby_kernel.gemm_axpby(factor, x, alpha=operand(alpha, x), beta=operand(beta, x), right=right)


def in_place(form: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The form that writes its result to the first tensor, and returns that tensor."""

    def written(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return x.copy_(form(x, *args, **kwargs))

    written.__name__ = f"{form.__name__}_"  # as graphs print it
    return written


FORMS: Mapping[Any, Callable[..., Tensor]] = {
    aten.mul.Tensor: mul,
    aten.div.Tensor: div,
    aten.add.Tensor: add,
    aten.sub.Tensor: sub,
    aten.lerp.Scalar: lerp,
    aten.addcmul.default: addcmul,
    aten.addcdiv.default: addcdiv,
    SYM_GEMM: sym_gemm,
    GEMM_AXPBY: gemm_axpby,
    aten.mul_.Tensor: in_place(mul),
    aten.div_.Tensor: in_place(div),
    aten.add_.Tensor: in_place(add),
    aten.sub_.Tensor: in_place(sub),
    aten.lerp_.Scalar: in_place(lerp),
    aten.addcmul_.default: in_place(addcmul),
    aten.addcdiv_.default: in_place(addcdiv),
}


def each_numbered(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the form of an operator once for every task of a loop.

    Args:
        op: an operator that `FORMS` has a form for.
        args: the arguments of `program_ops.each` after its first one.
        kwargs: the keyword arguments of `program_ops.each`.

    Returns:
        What `program_ops.each` returns.
    """
    return program_ops.each(FORMS[op], *args, **kwargs)
