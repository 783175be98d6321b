"""Roots and QR decompositions as operators `canzona::...`, which graphs hold and fake tensors pass through."""

from __future__ import annotations

import torch
from torch import Tensor

from canzona_compile.kernels.cholesky_qr import cholesky_qr
from canzona_compile.kernels.inverse_root import check, inverse_root

NAMESPACE = "canzona"


@torch.library.custom_op(
    f"{NAMESPACE}::inverse_root",
    mutates_args=(),
    schema="(Tensor matrix, int p, float ridge=0., float? floor=None) -> Tensor",
)
def inverse_root_op(matrix: Tensor, p: int, ridge: float = 0.0, floor: float | None = None) -> Tensor:
    """`kernels.inverse_root.inverse_root`: [..., n, n] to [..., n, n]."""
    return inverse_root(matrix, p, ridge, floor)


@inverse_root_op.register_fake
def _(matrix: Tensor, p: int, ridge: float = 0.0, floor: float | None = None) -> Tensor:
    check(matrix, p, None)  # not the floor, which may be a symbol
    return torch.empty_like(matrix, memory_format=torch.contiguous_format)


@torch.library.custom_op(f"{NAMESPACE}::cholesky_qr", mutates_args=(), schema="(Tensor matrix) -> (Tensor, Tensor)")
def cholesky_qr_op(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """`kernels.cholesky_qr.cholesky_qr`: [..., m, n] to Q [..., m, n] and R [..., n, n]."""
    basis, triangle = cholesky_qr(matrix)
    return basis.contiguous(), triangle.contiguous()


@cholesky_qr_op.register_fake
def _(matrix: Tensor) -> tuple[Tensor, Tensor]:
    n = matrix.shape[-1]
    return matrix.new_empty(matrix.shape), matrix.new_empty((*matrix.shape[:-2], n, n))


INVERSE_ROOT = torch.ops.canzona.inverse_root.default
CHOLESKY_QR = torch.ops.canzona.cholesky_qr.default
