"""The operators that graphs call: `canzona::sym_gemm`, `canzona::gemm_axpby` and `canzona::pad_cast`.

They are registered with torch, so graphs that call them can be traced, printed and checked without a GPU. On a CPU they
are the plain torch references, on CUDA the kernels. All dims before the last two are batch dims.
"""

from __future__ import annotations

import torch
from torch import Tensor

from canzona_compile.kernels import gemm_axpby as axpby_kernel
from canzona_compile.kernels import padding
from canzona_compile.kernels import sym_gemm as sym_kernel

NAMESPACE = "canzona"


@torch.library.custom_op(
    f"{NAMESPACE}::sym_gemm",
    mutates_args=(),
    device_types="cpu",
    schema="(Tensor a, Tensor? b=None, Tensor? c=None, *, float alpha=1.0, float beta=0.0, float diag=0.0,"
    " bool trans=False) -> Tensor",
)
def sym_gemm(
    a: Tensor,
    b: Tensor | None = None,
    c: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    diag: float = 0.0,
    trans: bool = False,
) -> Tensor:
    """Compute alpha A (B or A)^T + beta C + diag I; kernels compute one triangle of it.

    Args:
        a, b: [..., M, K], or [..., K, M] if `trans`, for A^T (B or A); b = None stands for a.
        c: symmetric, [..., M, M].

    Returns:
        [..., M, M] in the dtype of a, contiguous, equal to its transpose bit by bit if a Triton kernel runs, up to
        rounding if the library runs. The caller knows that the product is symmetric in exact arithmetic.
    """
    return sym_kernel.reference(a, b, c, alpha=alpha, beta=beta, diag=diag, trans=trans).contiguous()


@sym_gemm.register_kernel("cuda")
def _(
    a: Tensor,
    b: Tensor | None = None,
    c: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    diag: float = 0.0,
    trans: bool = False,
) -> Tensor:
    return sym_kernel.sym_gemm(a, b, c, alpha=alpha, beta=beta, diag=diag, trans=trans)


@sym_gemm.register_fake
def _(
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
        raise ValueError(f"a is {list(a.shape)}, b {list(b.shape)}: they must be alike")
    if c is not None and c.shape != (*a.shape[:-2], m, m):
        raise ValueError(f"c is {list(c.shape)}, the product {[*a.shape[:-2], m, m]}")
    return a.new_empty(*a.shape[:-2], m, m)


@torch.library.custom_op(
    f"{NAMESPACE}::gemm_axpby",
    mutates_args=(),
    device_types="cpu",
    schema="(Tensor factor, Tensor x, *, float alpha=1.0, float beta=1.0, bool right=False) -> Tensor",
)
def gemm_axpby(factor: Tensor, x: Tensor, *, alpha: float = 1.0, beta: float = 1.0, right: bool = False) -> Tensor:
    """Compute alpha X + beta F X, or alpha X + beta X F if `right`.

    Args:
        factor: [..., M, M], or [..., N, N] if `right`.
        x: [..., M, N].

    Returns:
        [..., M, N] in the dtype of x, contiguous.
    """
    return axpby_kernel.reference(factor, x, alpha=alpha, beta=beta, right=right).contiguous()


@gemm_axpby.register_kernel("cuda")
def _(factor: Tensor, x: Tensor, *, alpha: float = 1.0, beta: float = 1.0, right: bool = False) -> Tensor:
    return axpby_kernel.gemm_axpby(factor, x, alpha=alpha, beta=beta, right=right)


@gemm_axpby.register_fake
def _(factor: Tensor, x: Tensor, *, alpha: float = 1.0, beta: float = 1.0, right: bool = False) -> Tensor:
    size = x.shape[-1] if right else x.shape[-2]
    if factor.shape != (*x.shape[:-2], size, size):
        raise ValueError(f"the factor is {list(factor.shape)}, not {[*x.shape[:-2], size, size]}")
    return x.new_empty(x.shape)


@torch.library.custom_op(f"{NAMESPACE}::pad_cast", mutates_args=(), schema="(Tensor x, *, ScalarType dtype) -> Tensor")
def pad_cast(x: Tensor, *, dtype: torch.dtype) -> Tensor:
    """`kernels.padding.pad_cast`: [..., M, N] to [..., Mp, Np] of `dtype`, padded with zeros to multiples of 16."""
    return padding.pad_cast(x, dtype)


@pad_cast.register_fake
def _(x: Tensor, *, dtype: torch.dtype) -> Tensor:
    return x.new_empty(*x.shape[:-2], *map(padding.padded_size, x.shape[-2:]), dtype=dtype)


SYM_GEMM = torch.ops.canzona.sym_gemm.default
GEMM_AXPBY = torch.ops.canzona.gemm_axpby.default
PAD_CAST = torch.ops.canzona.pad_cast.default
