"""A matrix plus its product with a square factor: Y = alpha X + beta (F X or X F)."""

from __future__ import annotations

import torch
from torch import Tensor


def reference(
    factor: Tensor,
    x: Tensor,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    right: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """The sum in plain torch.

    Args:
        factor: [..., M, M], or [..., N, N] where `right`.
        x: [..., M, N].
        right: the factor stands on the right.
        out: [..., M, N], written and returned where given.

    Returns:
        [..., M, N] in the dtype of x. 16-bit operands are accumulated in float32 and rounded once.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    f, own = factor.to(wide), x.to(wide)
    result = (alpha * own + beta * (own @ f if right else f @ own)).to(x.dtype)
    return result if out is None else out.copy_(result)


def gemm_axpby(
    factor: Tensor,
    x: Tensor,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    right: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """As `reference`."""
    return reference(factor, x, alpha=alpha, beta=beta, right=right, out=out)
