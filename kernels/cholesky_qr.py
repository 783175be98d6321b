"""QR decompositions by products, Cholesky factors and triangular solves: work that batches on a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from canzona_compile.kernels.full_precision import full_precision

SHIFT = 8 * 2.0**-24  # of a Gram matrix, relative to its Frobenius norm: a few of its rounding errors
LEAST_PIVOT = 2.0**-8  # of a Cholesky factor of normalised columns: with less a round leaves more than it removes
FIRST, LAST = 2, 3  # rounds before and after `filled`


def cholesky_qr(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Q and R of A = Q R, with R's diagonal not negative.

    First the columns get length 1, which changes R and not Q. A product S V, with V about the eigenvectors of S, is
    then well-conditioned for every S. A round takes G = A^T A, its Cholesky factor L, and A
    L^-T for A (CholeskyQR); two rounds make columns orthogonal to rounding if the condition is below 1e3 (CholeskyQR2,
    Yamamoto et al. 2015). For other matrices a round takes the factor of G + s I (shifted CholeskyQR, Fukaya et al.
    2020), which divides the condition by about 1e3, so there are more rounds. `torch.where` chooses by what the
    factorization reports, for each matrix of a batch, and the host waits for nothing. If columns are dependent to
    rounding, A does not determine all of Q. Householder's method then completes Q by arbitrary directions; this one
    takes them from a fixed table of noise.

    Householder's method, and so torch.linalg.qr, gives R a diagonal of either sign. Both are QR decompositions: with
    s = sign(diag R) they turn into each other by Q s, s R. Code that depends on the sign is not portable (torch's
    documentation says so), and the eigenvectors that Q approximates have no sign either.

    Measured on float32 matrices of order 8 to 256, square and tall, whose singular values lie evenly in the logarithm
    from 1 to 1 / condition (`tests/kernels/test_cholesky_qr.py` asserts it):

        condition            1       1e2     1e4     1e6     beyond
        |Q^T Q - I|          1e-6    1e-6    1e-6    1e-6    1e-6       Frobenius, by the root of n
        |Q R - A| / |A|      2e-6    2e-6    2e-6    2e-5    4e-5       Frobenius; dependent columns: beyond

    Args:
        matrix: [..., m, n] float32 with m >= n.

    Returns:
        Q [..., m, n] and R [..., n, n], upper triangular.

    Raises:
        TypeError: another dtype.
        ValueError: more columns than rows.
    """
    if matrix.dtype != torch.float32:
        raise TypeError(f"cholesky_qr takes float32, not {matrix.dtype}: cast the matrix, or use torch.linalg.qr")
    if matrix.ndim < 2 or matrix.shape[-2] < matrix.shape[-1]:
        raise ValueError(f"cholesky_qr takes matrices [..., m, n] with m >= n, not {list(matrix.shape)}")
    with full_precision():
        least = torch.finfo(matrix.dtype).tiny
        scaled = matrix / matrix.abs().amax(dim=-2, keepdim=True).clamp(min=least)
        basis = scaled / scaled.norm(dim=-2, keepdim=True).clamp(min=least)
        for _ in range(FIRST):
            basis = round_of(basis)
        basis = filled(basis)
        for _ in range(LAST):
            basis = round_of(basis)
        triangle = (basis.mT @ matrix).triu()
        triangle.diagonal(dim1=-2, dim2=-1).clamp_(min=0.0)  # rounding leaves either sign for dependent columns
        return basis, triangle


def round_of(basis: Tensor) -> Tensor:
    """Return A L^-T, where L is the Cholesky factor of A^T A, or of A^T A plus a shift."""
    gram = basis.mT @ basis
    factor, info = torch.linalg.cholesky_ex(gram)
    pivot = factor.diagonal(dim1=-2, dim2=-1).amin(dim=-1)
    bad = ((info > 0) | ~(pivot > LEAST_PIVOT))[..., None, None]
    size = gram.norm(dim=(-2, -1), keepdim=True).clamp(min=1.0)  # columns of length 1 give at least 1, zeros less
    shifted, failed = torch.linalg.cholesky_ex(gram + size * SHIFT * identity(gram))
    shifted = torch.where((failed > 0)[..., None, None], size.sqrt() * identity(gram), shifted)
    factor = torch.where(bad, shifted, factor)
    solved: Tensor = torch.linalg.solve_triangular(factor.mT, basis, upper=True, left=False)
    return solved


def filled(basis: Tensor) -> Tensor:
    """Add the missing directions to columns that are still dependent; other columns stay as they are.

    If each singular value of A is 1 or 0, I - A^T A is the projection on the combinations of columns that vanish, and
    I - A A^T is the projection on the space that no column reaches.
    """
    missing = identity(basis[..., :1, :]) - basis.mT @ basis
    other = noise(basis)
    added: Tensor = (other - basis @ (basis.mT @ other)) @ missing
    return basis + added


def identity(like: Tensor) -> Tensor:
    return torch.eye(like.shape[-1], dtype=like.dtype, device=like.device)


def noise(like: Tensor) -> Tensor:
    """Make a fixed matrix [m, n] without structure, whose columns have about length 1, on the device, from integers."""
    m, n = like.shape[-2:]
    rows = torch.arange(1, m + 1, device=like.device)[:, None]
    columns = torch.arange(1, n + 1, device=like.device)
    mixed = rows * 0x9E3779B1 + columns * 0x85EBCA77
    for multiplier in (0x7FEB352D, 0x846CA68B):
        mixed = ((mixed ^ (mixed >> 15)) & 0x7FFFFFFF) * multiplier & 0xFFFFFFFF
    mixed = (mixed ^ (mixed >> 16)) & 0xFFFFFF
    made: Tensor = (mixed.to(like.dtype) * 2.0**-23 - 1.0) * (3.0 / max(m, 1)) ** 0.5
    return made


def flops(m: Any, n: Any) -> Any:
    """Count the FLOPs of `cholesky_qr`: products, factors and solves of the rounds, `filled`, R."""
    rounds = FIRST + LAST
    return rounds * (3 * m * n**2 + 2 * n**3 / 3) + 10 * m * n**2


def reference(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return torch.linalg.qr in float64, with R's diagonal not negative."""
    q, r = torch.linalg.qr(matrix.double())
    sign = torch.where(r.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0)
    return q * sign.unsqueeze(-2), r * sign.unsqueeze(-1)
