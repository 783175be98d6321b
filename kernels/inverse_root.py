"""Computes inverse p-th roots of symmetric matrices by matrix products alone: no eigenvalues, no wait for the host."""

from __future__ import annotations

import torch
from torch import Tensor

from canzona_compile.kernels.full_precision import full_precision
from canzona_compile.kernels.minimax import Coefficients, schedule

SMALLEST = 2.0**-19  # of the largest eigenvalue: accuracy falls off slowly below it, to a soft floor
TOLERANCE = 2.0**-23  # the relative error of the composed polynomials
SIGN_SMALLEST = 2.0**-40  # of squares: it leaves the sign unresolved for eigenvalues below 2^-20 of the largest one
LARGEST_P = 16


def inverse_root(matrix: Tensor, p: int, ridge: float = 0.0, floor: float | None = None) -> Tensor:
    """Compute max(A + ridge I, floor I)^(-1/p) for symmetric A, where max acts on the eigenvalues.

    A is scaled by a bound of its norm, and coupled iterates X -> A^(-1/p), M = X^p A -> I take the steps of
    `minimax.schedule`: Q = a I + b M + c M^2, X <- X Q, M <- Q^(p/2) M Q^(p/2). This is the inverse Newton iteration
    (Guo and Higham 2006, "A Schur-Newton method for the matrix pth root and its inverse"), with best polynomials
    instead of Newton's. A floor is (B + |B|) / 2 + floor I for B = A + (ridge - floor) I, with |B| = B sign(B) and
    the sign by the same polynomials. The number of products is fixed; nothing depends on values.

    Largest error (Frobenius, relative to the result) against the root in float64 of the same float32 matrix, orders 8
    to 256, eigenvalues from 1 to 1 / condition: evenly in the logarithm, or half of them at either end, or all but one
    (`tests/kernels/test_roots.py` asserts it):

        condition   1       1e2     1e4     1e6     beyond
        p = 2       1e-6    1e-5    1e-3    1e-1    finite
        p = 4       1e-6    5e-6    5e-4    5e-2    finite

    That is 1e-7 condition / p, what one rounding of A does; float32 eigenvalues do the same or worse. Where A + ridge I
    has eigenvalues below 1e-7 of the largest one, the result is as if they were about that large; in an
    eigendecomposition in float32 they are noise as well. With a floor the condition is at most that of the largest
    eigenvalue to the floor, and the floor is met up to 2^-20 of the largest eigenvalue.

    Args:
        matrix: [..., n, n] float32. Only the lower triangle is read, as torch.linalg.eigh does.
        p: a power of two from 2 to 16.
        ridge: added to all eigenvalues. The sums have to be at least 0, up to rounding, unless there is a floor:
            negative numbers have no roots, and the result is then arbitrary.
        floor: the least eigenvalue after adding `ridge`.

    Returns:
        [..., n, n] float32, contiguous and symmetric up to rounding.

    Raises:
        TypeError: another dtype.
        ValueError: no square matrices, another p, or a floor that is not positive.
    """
    check(matrix, p, floor)
    with full_precision():
        lower = matrix.tril()
        symmetric = lower + matrix.tril(-1).mT
        if ridge != 0.0:
            symmetric.diagonal(dim1=-2, dim2=-1).add_(ridge)
        bound = norm_bound(symmetric)
        if floor is not None:
            symmetric = floored(symmetric, bound, floor)
            bound = bound.clamp(min=floor)
        root = scaled_root(symmetric / bound, p)
        return root.mul_(bound.pow(-1.0 / p))


def check(matrix: Tensor, p: int, floor: float | None) -> None:
    if matrix.dtype != torch.float32:
        raise TypeError(f"inverse_root takes float32, not {matrix.dtype}: cast the matrix, or use torch.linalg.eigh")
    if matrix.ndim < 2 or matrix.shape[-1] != matrix.shape[-2]:
        raise ValueError(f"inverse_root takes square matrices [..., n, n], not {list(matrix.shape)}")
    if not 2 <= p <= LARGEST_P or p & (p - 1):
        raise ValueError(f"p must be a power of two from 2 to {LARGEST_P}, not {p}")
    if floor is not None and not floor > 0.0:
        raise ValueError(f"floor must be positive, not {floor}")


def norm_bound(matrix: Tensor) -> Tensor:
    """Bound the largest absolute eigenvalue from above, [..., 1, 1], at most n^(1/8) too large: 2.4 for n = 1024.

    It is the Frobenius norm of A^4, to the power 1/4. The Frobenius norm of A itself may be n^(1/2) too large, and
    a larger bound costs accuracy for small eigenvalues. For zeros the bound is the least positive number.
    """
    least = torch.finfo(matrix.dtype).tiny
    rough = matrix.abs().sum(dim=-1, keepdim=True).amax(dim=-2, keepdim=True).clamp(min=least)
    scaled = matrix / rough
    square = scaled @ scaled
    fourth = square @ square
    bound: Tensor = rough * fourth.norm(dim=(-2, -1), keepdim=True).pow(0.25) * (1.0 + 2.0**-10)
    return bound.clamp(min=least)


def scaled_root(matrix: Tensor, p: int) -> Tensor:
    """Compute A^(-1/p) for eigenvalues in [0, 1]."""
    steps = schedule(p, SMALLEST, TOLERANCE)
    root = matrix
    for k, step in enumerate(steps):
        factor = polynomial(matrix, step)
        root = factor if k == 0 else root @ factor
        if k + 1 < len(steps):
            half = factor
            for _ in range(p.bit_length() - 2):
                half = half @ half
            matrix = half @ matrix @ half
            matrix = (matrix + matrix.mT) / 2
    return root


def polynomial(matrix: Tensor, coefficients: Coefficients) -> Tensor:
    """Compute a I + b M + c M^2."""
    a, b, c = coefficients
    result = (matrix @ matrix).mul_(c).add_(matrix, alpha=b)
    result.diagonal(dim1=-2, dim2=-1).add_(a)
    return result


def floored(matrix: Tensor, bound: Tensor, floor: float) -> Tensor:
    """Raise eigenvalues below `floor` to `floor`; `bound` is the norm bound of the matrix."""
    above = matrix.clone()
    above.diagonal(dim1=-2, dim2=-1).sub_(floor)
    sign = above / (bound + floor)
    for step in schedule(2, SIGN_SMALLEST, TOLERANCE):
        sign = sign @ polynomial(sign @ sign, step)
    size = above @ sign
    result = above.add_((size + size.mT) / 2).mul_(0.5)
    result.diagonal(dim1=-2, dim2=-1).add_(floor)
    return result


def products(p: int, floored: bool) -> int:
    """Count the products of n x n matrices that `inverse_root` takes, 2 n^3 FLOPs each."""
    steps = len(schedule(p, SMALLEST, TOLERANCE))
    power = p.bit_length() - 2  # squarings to Q^(p/2)
    total = 2 + steps + (steps - 1) * (1 + power + 2)
    if floored:
        total += 3 * len(schedule(2, SIGN_SMALLEST, TOLERANCE)) + 1
    return total


def reference(matrix: Tensor, p: int, ridge: float = 0.0, floor: float | None = None) -> Tensor:
    """Compute the same by eigenvalues in float64."""
    eigenvalues, eigenvectors = torch.linalg.eigh(matrix.double())
    eigenvalues = eigenvalues + ridge
    if floor is not None:
        eigenvalues = eigenvalues.clamp(min=floor)
    root: Tensor = eigenvectors * eigenvalues.pow(-1.0 / p).unsqueeze(-2) @ eigenvectors.mT
    return root
