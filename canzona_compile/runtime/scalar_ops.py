"""Numbers in tensors, and operators that take them, rounding as ATen's CUDA kernels do with numbers.

In 32 bits where tensors have 16, with one rounding for a product and its sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from canzona_compile.ir import program_ops
from canzona_compile.kernels import gemm_axpby as axpby_kernel
from canzona_compile.kernels import sym_gemm as sym_kernel
from canzona_compile.kernels.ops import GEMM_AXPBY, SYM_GEMM

aten = torch.ops.aten


class DeviceNumber:
    """A number as 0-d tensors, in 32 and in 64 bits."""

    def __init__(self, device: torch.device) -> None:
        self.single = torch.zeros((), dtype=torch.float32, device=device)
        self.double = torch.zeros((), dtype=torch.float64, device=device)
        self.value: float | None = None

    def fill(self, value: float) -> None:
        """Give it a value, on the current stream; nothing is launched where it has that already."""
        if value != self.value:
            self.single.fill_(value)
            self.double.fill_(value)
            self.value = value

    def beside(self, tensor: Tensor) -> Tensor:
        """As precise as arithmetic with `tensor` is."""
        return self.double if tensor.dtype == torch.float64 else self.single


def wide(tensor: Tensor) -> Tensor:
    """In the precision in which ATen computes: 16-bit formats in 32 bits."""
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


def operand(value: Any, tensor: Tensor) -> Any:
    if isinstance(value, DeviceNumber):
        return value.beside(tensor)
    return wide(value) if isinstance(value, Tensor) else value


def result_dtype(*values: Any) -> torch.dtype:
    """Of an operator on floating-point tensors; numbers do not count."""
    tensors = [v for v in values if isinstance(v, Tensor)]
    found = tensors[0].dtype
    for tensor in tensors[1:]:
        found = torch.promote_types(found, tensor.dtype)
    return found if found.is_floating_point else torch.get_default_dtype()


def tensor_among(*values: Any) -> Tensor:
    return next(v for v in values if isinstance(v, Tensor))


def mul(x: Any, y: Any) -> Tensor:
    """x * y; either may be a number."""
    like = tensor_among(x, y)
    return torch.mul(operand(x, like), operand(y, like)).to(result_dtype(x, y))


def div(x: Any, y: Any) -> Tensor:
    """x / y. By a number ATen's CUDA kernel multiplies with its reciprocal."""
    like = tensor_among(x, y)
    a, b = operand(x, like), operand(y, like)
    by_reciprocal = isinstance(y, DeviceNumber) and like.is_cuda
    return (torch.mul(a, b.reciprocal()) if by_reciprocal else torch.div(a, b)).to(result_dtype(x, y))


def add(x: Any, y: Any, *, alpha: Any = 1) -> Tensor:
    """x + alpha y, in one rounding on CUDA."""
    return scaled_sum(x, y, alpha, 1)


def sub(x: Any, y: Any, *, alpha: Any = 1) -> Tensor:
    """x - alpha y, in one rounding on CUDA."""
    return scaled_sum(x, y, alpha, -1)


def scaled_sum(x: Any, y: Any, alpha: Any, sign: int) -> Tensor:
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
    """x + weight (end - x), as ATen does it."""
    return torch.lerp(wide(x), wide(end), operand(weight, x)).to(result_dtype(x, end))


def addcmul(x: Tensor, a: Tensor, b: Tensor, *, value: Any = 1) -> Tensor:
    """x + value a b, with a b rounded first, as CUDA's kernel does it."""
    return torch.addcmul(wide(x), torch.mul(wide(a), wide(b)), operand(value, x)).to(result_dtype(x, a, b))


def addcdiv(x: Tensor, a: Tensor, b: Tensor, *, value: Any = 1) -> Tensor:
    """x + value a / b."""
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
    """`canzona::sym_gemm`, whose kernels take numbers in tensors, but not its schema."""
    first, second, third = (operand(number, a) for number in (alpha, beta, diag))
    return sym_kernel.sym_gemm(a, b, c, alpha=first, beta=second, diag=third, trans=trans)


def gemm_axpby(factor: Tensor, x: Tensor, *, alpha: Any = 1.0, beta: Any = 1.0, right: bool = False) -> Tensor:
    """`canzona::gemm_axpby`, likewise."""
    return axpby_kernel.gemm_axpby(factor, x, alpha=operand(alpha, x), beta=operand(beta, x), right=right)


def mul_(x: Tensor, y: Any) -> Tensor:
    return x.copy_(mul(x, y))


def div_(x: Tensor, y: Any) -> Tensor:
    return x.copy_(div(x, y))


def add_(x: Tensor, y: Any, *, alpha: Any = 1) -> Tensor:
    return x.copy_(add(x, y, alpha=alpha))


def sub_(x: Tensor, y: Any, *, alpha: Any = 1) -> Tensor:
    return x.copy_(sub(x, y, alpha=alpha))


def lerp_(x: Tensor, end: Tensor, weight: Any) -> Tensor:
    return x.copy_(lerp(x, end, weight))


def addcmul_(x: Tensor, a: Tensor, b: Tensor, *, value: Any = 1) -> Tensor:
    return x.copy_(addcmul(x, a, b, value=value))


def addcdiv_(x: Tensor, a: Tensor, b: Tensor, *, value: Any = 1) -> Tensor:
    return x.copy_(addcdiv(x, a, b, value=value))


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
    aten.mul_.Tensor: mul_,
    aten.div_.Tensor: div_,
    aten.add_.Tensor: add_,
    aten.sub_.Tensor: sub_,
    aten.lerp_.Scalar: lerp_,
    aten.addcmul_.default: addcmul_,
    aten.addcdiv_.default: addcdiv_,
}


def each_numbered(op: Any, *args: Any, **kwargs: Any) -> Any:
    """The form of `op` for every task, see `program_ops.each`."""
    return program_ops.each(FORMS[op], *args, **kwargs)
