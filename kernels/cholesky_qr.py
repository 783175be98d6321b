"""QR decompositions by products, Cholesky factors and triangular solves: work that batches on a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from canzona_compile.kernels.full_precision import full_precision

SHIFT = 8 * 2.0**-24  # of a Gram matrix, by its Frobenius norm: a few of its rounding errors
LEAST_PIVOT = 2.0**-8  # of a Cholesky factor of normalised columns: below it a round leaves more than it removes
FIRST, LAST = 2, 3  # rounds before and after missing directions are filled in


def cholesky_qr(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Q and R of A = Q R, with R's diagonal not negative.

    Columns are brought to length 1, which changes R and not Q: what is left of a product S V, with V about the
    eigenvectors of S, is then well-conditioned however S is. A round takes G = A^T A, its Cholesky factor L, and A
    L^-T for A (CholeskyQR); two rounds make columns orthogonal to rounding if the condition is below 1e3
    (CholeskyQR2, Yamamoto et al. 2015). For others a round takes the factor of G + s I (shifted CholeskyQR, Fukaya et
    al. 2020), which divides the condition by about 1e3, so there are more of them; the choice is by `torch.where` on
    what the factorization reports, for every matrix of a batch, and the host waits for nothing. Where columns are
    dependent to rounding, A does not determine all of Q; Householder's method then completes it by directions that
    nothing prescribes, and so does this one, from a fixed table of noise.

    Householder's method, and so torch.linalg.qr, gives R a diagonal of either sign. Both are QR decompositions: with
    s = sign(diag R) they turn into each other by Q s, s R. Code that depends on the sign is not portable (torch's
    documentation says so), and the eigenvectors of which Q is an approximation have none either.

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
        raise TypeError(f"cholesky_qr takes float32, not {matrix.dtype}: cast, or take torch.linalg.qr")
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
        triangle.diagonal(dim1=-2, dim2=-1).clamp_(min=0.0)  # of dependent columns rounding leaves either sign
        return basis, triangle


def round_of(basis: Tensor) -> Tensor:
    """A L^-T, with L the Cholesky factor of A^T A, or of that and a shift."""
    gram = basis.mT @ basis
    factor, info = torch.linalg.cholesky_ex(gram)
    pivot = factor.diagonal(dim1=-2, dim2=-1).amin(dim=-1)
    bad = ((info > 0) | ~(pivot > LEAST_PIVOT))[..., None, None]
    size = gram.norm(dim=(-2, -1), keepdim=True).clamp(min=1.0)  # columns of length 1 give at least that; zeros less
    shifted, failed = torch.linalg.cholesky_ex(gram + size * SHIFT * identity(gram))
    shifted = torch.where((failed > 0)[..., None, None], size.sqrt() * identity(gram), shifted)
    factor = torch.where(bad, shifted, factor)
    solved: Tensor = torch.linalg.solve_triangular(factor.mT, basis, upper=True, left=False)
    return solved


def filled(basis: Tensor) -> Tensor:
    """Give columns that are still dependent what is missing in their span; others stay as they are.

    With singular values of A either 1 or 0, I - A^T A is the projection on the combinations of columns that vanish,
    and I - A A^T that on the space that no column reaches.
    """
    missing = identity(basis[..., :1, :]) - basis.mT @ basis
    other = noise(basis)
    added: Tensor = (other - basis @ (basis.mT @ other)) @ missing
    return basis + added


def identity(like: Tensor) -> Tensor:
    return torch.eye(like.shape[-1], dtype=like.dtype, device=like.device)


def noise(like: Tensor) -> Tensor:
    """A fixed matrix [m, n] without structure, its columns about of length 1; made on the device, from integers."""
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
    """Of `cholesky_qr`: products, factors and solves of the rounds, the filling, R. Of numbers or of formulas."""
    rounds = FIRST + LAST
    return rounds * (3 * m * n**2 + 2 * n**3 / 3) + 10 * m * n**2


def reference(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """torch.linalg.qr in float64, with R's diagonal not negative."""
    q, r = torch.linalg.qr(matrix.double())
    sign = torch.where(r.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0)
    return q * sign.unsqueeze(-2), r * sign.unsqueeze(-1)
