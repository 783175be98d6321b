"""Roots and QR decompositions as operators `canzona::...`, which graphs hold and fake tensors pass through.

INVERSE_ROOT(matrix, p, ridge, floor) is `kernels.inverse_root.inverse_root`: [..., n, n] to [..., n, n].
CHOLESKY_QR(matrix) is `kernels.cholesky_qr.cholesky_qr`: [..., m, n] to Q [..., m, n] and R [..., n, n], contiguous.
"""

from __future__ import annotations

import torch
from torch import Tensor

from canzona_compile.kernels.cholesky_qr import cholesky_qr
from canzona_compile.kernels.inverse_root import check, inverse_root
from canzona_compile.kernels.registration import register


def _inverse_root_shape(matrix: Tensor, p: int, ridge: float = 0.0, floor: float | None = None) -> Tensor:
    check(matrix, p, None)  # not the floor, which may be a symbol
    return torch.empty_like(matrix, memory_format=torch.contiguous_format)


def _inverse_root(matrix: Tensor, p: int, ridge: float = 0.0, floor: float | None = None) -> Tensor:
    return inverse_root(matrix, p, ridge, floor)


def _cholesky_qr_shape(matrix: Tensor) -> tuple[Tensor, Tensor]:
    n = matrix.shape[-1]
    return matrix.new_empty(matrix.shape), matrix.new_empty((*matrix.shape[:-2], n, n))


def _cholesky_qr(matrix: Tensor) -> tuple[Tensor, Tensor]:
    basis, triangle = cholesky_qr(matrix)
    return basis.contiguous(), triangle.contiguous()


INVERSE_ROOT = register(
    "inverse_root(Tensor matrix, int p, float ridge=0., float? floor=None) -> Tensor",
    _inverse_root_shape,
    _inverse_root,
)
CHOLESKY_QR = register("cholesky_qr(Tensor matrix) -> (Tensor, Tensor)", _cholesky_qr_shape, _cholesky_qr)
