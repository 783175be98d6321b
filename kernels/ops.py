"""The operators that graphs call: `canzona::sym_gemm`, `gemm_axpby`, `pad_cast` and `div_cast`.

They are registered with torch, so graphs that call them can be traced, printed and checked without a GPU. On a CPU they
are the plain torch references, on CUDA the kernels. All dims before the last two are batch dims.

`torch.library.custom_op` would do more for every call, in Python. On a CPU a call of `canzona::sym_gemm` would cost 27
us beyond its own work, and 7 us this way (torch 2.13, medians of 25 rounds in turn on one core). A step on a GPU calls
dozens, and the host has to be ahead of the device. Nobody asks these operators for gradients.

SYM_GEMM(a, b, c, *, alpha, beta, diag, trans) is alpha A (B or A)^T + beta C + diag I; kernels compute one triangle.
    a, b: [..., M, K], or [..., K, M] if `trans`, for A^T (B or A); b = None stands for a. c: symmetric, [..., M, M].
    Result: [..., M, M] in the dtype of a, contiguous, equal to its transpose bit by bit if a Triton kernel runs, up to
    rounding if a library runs. The caller knows that the product is symmetric in exact arithmetic.

GEMM_AXPBY(factor, x, *, alpha, beta, right) is alpha X + beta F X, or alpha X + beta X F if `right`.
    factor: [..., M, M], or [..., N, N] if `right`. x: [..., M, N]. Result: [..., M, N], of the dtype and strides of x.

PAD_CAST(x, *, dtype) is `kernels.padding.pad_cast`: [..., M, N] to [..., Mp, Np] of `dtype`, padded with zeros to
    multiples of 16.

DIV_CAST(x, y, *, dtype) is x / y in float32 at least, rounded to `dtype` once. x: [..., M, N], y broadcasts to it.
    Result: [..., M, N] in the strides of x. It reads x and writes the result; a division and a cast do both twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from canzona_compile.compat.torch_private import OpOverload
from canzona_compile.kernels import gemm_axpby as axpby_kernel
from canzona_compile.kernels import padding
from canzona_compile.kernels import sym_gemm as sym_kernel

NAMESPACE = "canzona"
LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")

Kernel = Callable[..., Any]


def register(
    schema: str, fake: Kernel, kernel: Kernel, cuda: Kernel | None = None, tags: tuple[torch.Tag, ...] = ()
) -> OpOverload:
    """Define an operator.

    Args:
        schema: `name(arguments) -> results`, without the namespace. It has to say that nothing is mutated.
        fake: makes empty results from fake tensors or tensors on the meta device, and raises ValueError where operands
            do not fit.
    """
    name = schema.partition("(")[0]
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag, *tags))
    LIBRARY.impl(name, kernel, "CompositeExplicitAutograd" if cuda is None else "CPU")
    if cuda is not None:
        LIBRARY.impl(name, cuda, "CUDA")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=LIBRARY)
    made = getattr(getattr(torch.ops, NAMESPACE), name).default
    assert isinstance(made, OpOverload)
    return made


def _sym_gemm_shape(
    a: Tensor,
    b: Tensor | None = None,
    c: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    diag: float = 0.0,
    trans: bool = False,
) -> Tensor:
    m = a.shape[-1] if trans else a.shape[-2]
    if b is not None and b.shape != a.shape:
        raise ValueError(f"a is {list(a.shape)}, b {list(b.shape)}: they must have the same shape")
    if c is not None and c.shape != (*a.shape[:-2], m, m):
        raise ValueError(f"c is {list(c.shape)}, but the product is {[*a.shape[:-2], m, m]}")
    return a.new_empty(*a.shape[:-2], m, m)


def _sym_gemm_reference(a: Tensor, b: Tensor | None = None, c: Tensor | None = None, **scalars: float) -> Tensor:
    return sym_kernel.reference(a, b, c, **scalars).contiguous()  # type: ignore[arg-type]


def _gemm_axpby_shape(
    factor: Tensor, x: Tensor, *, alpha: float = 1.0, beta: float = 1.0, right: bool = False
) -> Tensor:
    size = x.shape[-1] if right else x.shape[-2]
    if factor.shape != (*x.shape[:-2], size, size):
        raise ValueError(f"the factor is {list(factor.shape)}, not {[*x.shape[:-2], size, size]}")
    return torch.empty_like(x)


def _gemm_axpby_reference(factor: Tensor, x: Tensor, **scalars: float) -> Tensor:
    return axpby_kernel.reference(factor, x, **scalars, out=torch.empty_like(x))  # type: ignore[arg-type]


def _pad_cast_shape(x: Tensor, *, dtype: torch.dtype) -> Tensor:
    return x.new_empty(*x.shape[:-2], *map(padding.padded_size, x.shape[-2:]), dtype=dtype)


def _pad_cast(x: Tensor, *, dtype: torch.dtype) -> Tensor:
    return padding.pad_cast(x, dtype)


def _div_cast_shape(x: Tensor, y: Tensor, *, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(x, dtype=dtype)


def _div_cast(x: Tensor, y: Tensor, *, dtype: torch.dtype) -> Tensor:
    y = y.view((1,) * x.ndim) if y.ndim == 0 else y  # torch would round a number to the dtype of x
    wide = torch.promote_types(y.dtype, torch.float32)
    return torch.div(x, y.to(wide), out=torch.empty_like(x, dtype=dtype))


SYM_GEMM = register(
    "sym_gemm(Tensor a, Tensor? b=None, Tensor? c=None, *, float alpha=1.0, float beta=0.0, float diag=0.0,"
    " bool trans=False) -> Tensor",
    _sym_gemm_shape,
    _sym_gemm_reference,
    cuda=sym_kernel.sym_gemm,
)
GEMM_AXPBY = register(
    "gemm_axpby(Tensor factor, Tensor x, *, float alpha=1.0, float beta=1.0, bool right=False) -> Tensor",
    _gemm_axpby_shape,
    _gemm_axpby_reference,
    cuda=axpby_kernel.gemm_axpby,
)
PAD_CAST = register("pad_cast(Tensor x, *, ScalarType dtype) -> Tensor", _pad_cast_shape, _pad_cast)
DIV_CAST = register(
    "div_cast(Tensor x, Tensor y, *, ScalarType dtype) -> Tensor",
    _div_cast_shape,
    _div_cast,
    tags=(torch.Tag.pointwise,),
)
