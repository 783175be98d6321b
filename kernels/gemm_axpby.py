"""gemm_axpby: alpha * X + beta * F @ X, or alpha * X + beta * X @ F.

This is the last product of a Newton-Schulz step. `baddbmm` first copies X to its result, and then adds the product
there. The Triton kernel needs no copy. The library has no product whose summand is in another place than its result.
"""

from __future__ import annotations

import torch
from torch import Tensor

from canzona_compile.kernels.dispatch import KernelChoice, Problem, record
from canzona_compile.kernels.tensor_args import (
    alignment,
    batched,
    decide,
    guard,
    matrices,
    runnable,
)


def gemm_axpby(
    factor: Tensor,
    x: Tensor,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    right: bool = False,
    out: Tensor | None = None,
    choice: KernelChoice | None = None,
) -> Tensor:
    """Y = alpha * X + beta * (F @ X), or alpha * X + beta * (X @ F) with `right`.

    Sums are kept in float32 (for float64 in float64) and rounded to x's dtype once.

    Args:
        factor: [..., M, M], or [..., N, N] with `right`.
        x: [..., M, N], of factor's dtype, any strides.
        out: [..., M, N] of x's dtype; must not overlap factor or x.

    Leading dims are broadcast against each other.

    Returns:
        Y: [..., M, N] of x's dtype; `out` if that is given. Else it lies in memory as x does, row-major or transposed,
        so that tiles that are read are written as they are.
    """
    matrices("x", x)
    m, n = x.shape[-2:]
    side = n if right else m
    matrices("factor", factor, (side, side), x)
    if factor.dtype != x.dtype:
        raise TypeError(f"factor is {factor.dtype} and x is {x.dtype}: they must have the same dtype")
    batch = torch.broadcast_shapes(factor.shape[:-2], x.shape[:-2])
    f, v = batched(factor, batch), batched(x, batch)
    target = torch.empty_like(x.expand(*batch, m, n)) if out is None else out
    matrices("out", target, (m, n), x)
    if target.shape[:-2] != batch or target.dtype != x.dtype:
        raise ValueError(f"out is {target.dtype} {tuple(target.shape)}, not {x.dtype} {(*batch, m, n)}")
    if target.numel() and target.data_ptr() in (x.data_ptr(), factor.data_ptr()):
        raise ValueError("out must not be x or factor, which are read while out is written")
    if target.numel() == 0:
        return target

    result = batched(target, batch)
    level = _alignment(side, f, v, result)
    problem = Problem("gemm_axpby", v.shape[0], side, m if right else n, x.dtype, target.dtype, level)
    choice = choice or decide(problem, x.device)
    record(problem, choice)
    if choice.kernel == "library":
        _library(f, v, result, alpha, beta, right)
    elif choice.kernel == "quack":
        _quack(f, v, result, alpha, beta, right)
    else:
        _triton(choice, f, v, result, alpha, beta, right)
    if result.data_ptr() != target.data_ptr():  # its leading dims have no common stride
        target.copy_(result.view(target.shape))
    return target


def reference(
    factor: Tensor,
    x: Tensor,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    right: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Compute the same in plain torch, in float32 (float64 in float64)."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    product = x.to(wide) @ factor.to(wide) if right else factor.to(wide) @ x.to(wide)
    y = (alpha * x.to(wide) + beta * product).to(x.dtype)
    return y if out is None else out.copy_(y)


def _alignment(side: int, f: Tensor, x: Tensor, target: Tensor) -> int:
    if (x.stride(2) == 1) != (target.stride(2) == 1):
        return 1  # a kernel would have to transpose the tiles
    least = alignment(f, x, target)
    return min(least, 8) if side % 16 else least


def _triton(
    choice: KernelChoice,
    f: Tensor,
    x: Tensor,
    target: Tensor,
    alpha: float,
    beta: float,
    right: bool,
) -> None:
    from canzona_compile.kernels.triton_parts import INTERPRETED  # here, so that everything else works without Triton

    runnable(choice, x, INTERPRETED)
    if choice.tile is None or choice.kernel not in ("tma", "pointer"):
        raise ValueError(f"gemm_axpby has no kernel {choice.kernel}")
    scalars = float(alpha), float(beta)
    if choice.kernel == "tma":
        if _alignment(8, f, x, target) < 8:
            raise ValueError("tma: rows must begin at multiples of 16 bytes, and out must have the strides of x")
        from canzona_compile.kernels.gemm_axpby_triton import launch_tma

        operands = (x, f) if right else (f, x)
        with guard(x):
            launch_tma(choice.tile, *operands, x, target, scalars)
        return
    from canzona_compile.kernels.gemm_axpby_triton import launch_pointer

    if right:  # X @ F is the transpose of F^T @ X^T, which strides can say
        f, x, target = f.mT, x.mT, target.mT
    with guard(x):
        launch_pointer(choice.tile, f, x, target, scalars)


def _quack(f: Tensor, x: Tensor, y: Tensor, alpha: float, beta: float, right: bool) -> None:
    """Write the products of quack-kernels to y. Its summand is in another place than its result, as ours is."""
    from quack.gemm_interface import gemm_add  # here, because it is optional

    first, second = (x, f) if right else (f, x)
    if y.stride(2) != 1:
        first, second, x, y = second.mT, first.mT, x.mT, y.mT
    with guard(x):
        gemm_add(first, second, x, out=y, alpha=float(beta), beta=float(alpha), tuned=False)


def _library(f: Tensor, x: Tensor, y: Tensor, alpha: float, beta: float, right: bool) -> None:
    """Write batched products of the library to y."""
    first, second = (x, f) if right else (f, x)
    torch.baddbmm(x, first, second, beta=alpha, alpha=beta, out=y)
