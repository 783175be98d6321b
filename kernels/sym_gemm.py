"""sym_gemm: symmetric products alpha * A @ B^T + beta * C + diag * I; kernels compute one triangle and mirror it.

One triangle of tiles is a little more than half of the work: (t + 1) / 2t of it, with t = ceil(M / 128) tiles a side.
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


def sym_gemm(
    a: Tensor,
    b: Tensor | None = None,
    c: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    diag: float = 0.0,
    trans: bool = False,
    out: Tensor | None = None,
    dtype: torch.dtype | None = None,
    choice: KernelChoice | None = None,
) -> Tensor:
    """Compute alpha * A @ (B or A)^T + beta * C + diag * I; the caller knows that the result is symmetric.

    Sums are kept in float32, whatever the operands are (float64 in float64), and rounded once at the end; the
    library may round once more for a `diag`. The Triton kernels compute one triangle and write it to both sides, so
    their result equals its transpose bit for bit, even where A @ B^T is symmetric only in exact arithmetic; a library's
    result is as symmetric as its product.

    Args:
        a: [..., M, K], or [..., K, M] with `trans`; float16, bfloat16, float32 or float64, any strides.
        b: like a. Give it only if A @ B^T is symmetric, as it is if A and B are polynomials of one symmetric matrix.
        c: [..., M, M], symmetric, of any floating dtype; one triangle is read, nothing if beta is 0.
        trans: compute A^T @ (B or A) of operands stored as [..., K, M].
        out: [..., M, M], the tensor to write and return. It may be c; it must not overlap a or b.

    Leading dims are broadcast against each other.

    Returns: [..., M, M].
    """
    matrices("a", a)
    m, k = (a.shape[-1], a.shape[-2]) if trans else (a.shape[-2], a.shape[-1])
    if b is not None:
        matrices("b", b, (a.shape[-2], a.shape[-1]), a)
        if b.dtype != a.dtype:
            raise TypeError(f"a is {a.dtype} and b is {b.dtype}: they must have the same dtype")
    if c is not None:
        matrices("c", c, (m, m), a)
        c = None if beta == 0.0 else c
    batch = torch.broadcast_shapes(*(t.shape[:-2] for t in (a, b, c) if t is not None))
    if out is None:
        out = a.new_empty(*batch, m, m, dtype=dtype or a.dtype)
    else:
        matrices("out", out, (m, m), a)
        if out.shape[:-2] != batch or (dtype is not None and out.dtype != dtype):
            raise ValueError(f"out is {out.dtype} {tuple(out.shape)}, not {dtype or out.dtype} {(*batch, m, m)}")
        if any(t is not None and t.data_ptr() == out.data_ptr() for t in (a, b)) and out.numel():
            raise ValueError("out must not be a or b, which are read while out is written")
    if out.numel() == 0:
        return out

    left = batched(a.mT if trans else a, batch)
    right = left if b is None else batched(b.mT if trans else b, batch)
    add = None if c is None else batched(c, batch)
    result = batched(out, batch)
    operands = [left, right, result] if add is None else [left, right, result, add]
    problem = Problem("sym_gemm", left.shape[0], m, k, a.dtype, out.dtype, _alignment(k, operands))
    choice = choice or decide(problem, a.device)
    record(problem, choice)
    _run(choice, left, right, add, result, alpha, beta, diag)
    if result.data_ptr() != out.data_ptr():  # out's leading dims have no common stride
        out.copy_(result.view(out.shape))
    return out


def reference(
    a: Tensor,
    b: Tensor | None = None,
    c: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    diag: float = 0.0,
    trans: bool = False,
    out: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute the same in plain torch, in float32 (float64 in float64), rounded once at the end."""
    wide = torch.float64 if a.dtype == torch.float64 else torch.float32
    left = (a.mT if trans else a).to(wide)
    right = left if b is None else (b.mT if trans else b).to(wide)
    result = alpha * (left @ right.mT)
    if c is not None and beta != 0.0:
        result = result + beta * c.to(wide)
    result = result + diag * torch.eye(left.shape[-2], dtype=wide, device=a.device)
    if out is not None:
        return out.copy_(result)
    return result.to(dtype or a.dtype)


def _alignment(k: int, operands: list[Tensor]) -> int:
    least = alignment(*operands)
    return min(least, 8) if k % 16 else least


def _run(
    choice: KernelChoice, a: Tensor, b: Tensor, c: Tensor | None, d: Tensor, alpha: float, beta: float, diag: float
) -> None:
    if choice.kernel == "library":
        _library(a, b, c, d, alpha, beta, diag)
        return
    scalars = (float(alpha), float(beta), float(diag))
    # Imported here, so that everything else works without Triton.
    from canzona_compile.kernels.triton_parts import INTERPRETED

    runnable(choice, a, INTERPRETED)
    assert choice.tile is not None
    if choice.kernel == "pointer":
        from canzona_compile.kernels.sym_gemm_triton import launch_pointer

        with guard(a):
            launch_pointer(choice.tile, a, b, c, d, scalars)
        return
    if alignment(*(x for x in (a, b, c, d) if x is not None)) < 8:
        raise ValueError(f"{choice.kernel}: rows must begin at multiples of 16 bytes; pad them")
    with guard(a):
        from canzona_compile.kernels.sym_gemm_triton import launch_tma

        launch_tma(choice.tile, a, b, c, d, scalars)


def _library(a: Tensor, b: Tensor, c: Tensor | None, d: Tensor, alpha: float, beta: float, diag: float) -> None:
    """[B, M, K] x [B, M, K] -> [B, M, M] by batched products of the library."""
    one_dtype = d.dtype == a.dtype and (c is None or c.dtype == a.dtype)
    if one_dtype:
        # With beta = 0 `baddbmm` does not read its first operand, so this passes the result.
        torch.baddbmm(d if c is None else c, a, b.mT, beta=0.0 if c is None else beta, alpha=alpha, out=d)
    else:
        result = alpha * _product(a, b.mT)
        d.copy_(result if c is None else result + beta * c)
    if diag != 0.0:
        d.diagonal(dim1=-2, dim2=-1).add_(diag)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, 16-bit operands with a float32 result."""
    if a.dtype in (torch.float16, torch.bfloat16):
        if a.is_cuda:
            return torch.bmm(a, b, out_dtype=torch.float32)
        return torch.bmm(a.float(), b.float())
    return torch.bmm(a, b)
