"""Matrices for the tests of factorizations, on the CPU and on a GPU, and how far results are off."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def with_spectrum(eigenvalues: Tensor, seed: int = 0, count: int = 2) -> Tensor:
    """Symmetric float32 matrices [count, n, n] with these eigenvalues and random eigenvectors."""
    n = len(eigenvalues)
    noise = torch.randn(count, n, n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    vectors = torch.linalg.qr(noise).Q
    low = (vectors * eigenvalues.double() @ vectors.mT).float()
    return low.tril() + low.tril(-1).mT


def spectrum(kind: str, n: int, condition: float) -> Tensor:
    """Eigenvalues from 1 to 1 / condition."""
    least = 1.0 / condition
    found = torch.full((n,), least if kind == "one large" else 1.0, dtype=torch.float64)
    match kind:
        case "even":
            return torch.logspace(0.0, -math.log10(min(condition, 1e30)), n, dtype=torch.float64)
        case "half small":
            found[n // 2 :] = least
        case "one small":
            found[-1] = least
        case "one large":
            found[0] = 1.0
    return found


KINDS = ("even", "half small", "one small", "one large")


def error(found: Tensor, expected: Tensor) -> float:
    """The largest of a batch, in the Frobenius norm, by that of what is expected."""
    apart = (found.double() - expected.double()).norm(dim=(-2, -1)) / expected.double().norm(dim=(-2, -1))
    return float(apart.max())


BOUNDS = {2: {1e0: 1e-6, 1e2: 1e-5, 1e4: 1e-3, 1e6: 1e-1}, 4: {1e0: 1e-6, 1e2: 5e-6, 1e4: 5e-4, 1e6: 5e-2}}


def orthogonal(m: int, n: int, seed: int, count: int = 2) -> Tensor:
    entries = torch.randn(count, m, n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return torch.linalg.qr(entries).Q


def with_condition(m: int, n: int, condition: float, seed: int = 0) -> Tensor:
    """Float32 matrices [2, m, n] with singular values from 1 to 1 / condition."""
    singular = torch.logspace(0.0, -math.log10(condition), n, dtype=torch.float64)
    return (orthogonal(m, n, seed) * singular @ orthogonal(n, n, seed + 1).mT).float()


def errors(matrix: Tensor, q: Tensor, r: Tensor) -> tuple[float, float]:
    """Of orthogonality, by the root of n, and of the product, by the matrix."""
    n = matrix.shape[-1]
    apart = (q.mT.double() @ q.double() - torch.eye(n)).norm(dim=(-2, -1)).max() / n**0.5
    size = matrix.double().norm(dim=(-2, -1)).clamp(min=1e-300)
    return float(apart), float(((q.double() @ r.double() - matrix.double()).norm(dim=(-2, -1)) / size).max())


def deficient(kind: str, m: int, n: int) -> Tensor:
    matrix = with_condition(m, n, 1e2)
    match kind:
        case "rank":
            return (orthogonal(m, n // 2, 0) @ orthogonal(n, n // 2, 1).mT).float()
        case "dead rows":
            matrix[:, : m // 2] = 0.0
        case "dead columns":
            matrix[..., n // 3 :] = 0.0
        case "equal columns":
            matrix[..., 1:4] = matrix[..., :1]
        case "zeros":
            matrix.zero_()
        case "ones":
            matrix.fill_(1.0)
    return matrix
