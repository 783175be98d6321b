"""Products that are known to be symmetric: D = alpha A (B or A)^T + beta C + diag I."""

from __future__ import annotations

import torch
from torch import Tensor


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
    """The product in plain torch.

    Args:
        a, b: [..., M, K], or [..., K, M] where `trans`; b is a where it is None. The product must be symmetric in
            exact arithmetic, which only the caller can know: its lower triangle is computed and mirrored.
        c: symmetric, [..., M, M].
        out: [..., M, M], written and returned where given.
        dtype: of the result; that of a by default.

    Returns:
        [..., M, M], equal to its transpose bit by bit. 16-bit operands are accumulated in float32 and rounded once.
    """
    wide = torch.promote_types(a.dtype, torch.float32)
    left, right = a.to(wide), (a if b is None else b).to(wide)
    full = alpha * (left.mT @ right if trans else left @ right.mT)
    if c is not None:
        full = full + beta * c.to(wide)
    if diag:
        full = full + diag * torch.eye(full.shape[-1], dtype=wide, device=a.device)
    result = (full.tril() + full.tril(-1).mT).to(dtype or a.dtype)
    return result if out is None else out.copy_(result)


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
) -> Tensor:
    """As `reference`."""
    return reference(a, b, c, alpha=alpha, beta=beta, diag=diag, trans=trans, out=out, dtype=dtype)
