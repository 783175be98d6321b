"""sym_gemm by another library, quack-kernels (`quack.gemm_interface.gemm_symmetric`), where it is installed.

It is never chosen by a published figure, only by the tuner. It is written in CuTe, whose kernels for Hopper reach more
of the device than Triton's do.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from canzona_compile.kernels.tensor_args import Scalar, alignment, is_zero


@cache
def gemm_symmetric() -> Callable[..., object]:
    """Import the library's function.

    Raises:
        ValueError: it is not there, or its import fails: such packages register operators, and some torch refuses.
    """
    try:
        found: Callable[..., object] = importlib.import_module("quack.gemm_interface").gemm_symmetric
    except Exception as error:
        raise ValueError(f"quack-kernels cannot be used: {type(error).__name__}: {error}") from error
    return found


def launch(a: Tensor, b: Tensor, c: Tensor | None, d: Tensor, scalars: tuple[Scalar, Scalar, Scalar]) -> None:
    """Write alpha * A @ B^T + beta * C + diag * I to d; a second kernel adds to the diagonal, rounded once more.

    Args:
        a, b: [B, M, K], float16 or bfloat16.
        c, d: [B, M, M], of the same dtype.
        scalars: alpha, beta and diag: floats, or 0-d tensors on the device.

    Raises:
        ValueError: operands are of other dtypes or not aligned, or the library is not there.
    """
    operands = [a, b, d] if c is None else [a, b, d, c]
    if a.dtype not in (torch.float16, torch.bfloat16) or any(x.dtype != a.dtype for x in operands):
        raise ValueError("quack: all operands must be float16, or all bfloat16")
    if alignment(*operands) < 8:
        raise ValueError("quack: rows must begin at multiples of 16 bytes; use the pointer kernel, or pad them")
    alpha, beta, diag = map(_number, scalars)
    # Their tests have no matrix that stands for a whole stack, and no result that is the summand too.
    left = _stacked(a)
    right = left if b is a else _stacked(b)
    if c is not None:
        c = c.clone() if c.data_ptr() == d.data_ptr() else _stacked(c)
    gemm_symmetric()(left, right.mT, C=c, out=d, alpha=alpha, beta=beta)
    if not is_zero(diag):
        d.diagonal(dim1=-2, dim2=-1).add_(diag)


def _number(value: Scalar) -> Scalar:
    """A float, or a 0-d float32 tensor, which is what their kernels read."""
    return value.reshape(()).to(torch.float32) if isinstance(value, Tensor) else float(value)


def _stacked(x: Tensor) -> Tensor:
    return x.contiguous() if x.shape[0] > 1 and x.stride(0) == 0 else x
