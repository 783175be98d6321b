"""NorMuon for one device: Muon whose update has rows, the neurons, of like size."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from canzona_compile.optimizers.matrices import MatrixOptimizer

QUINTIC = (3.4445, -4.7750, 2.0315)  # a x + b x^3 + c x^5 of Muon (Keller Jordan, kellerjordan.github.io/posts/muon)
ADAM_RMS = 0.2  # root mean square of usual AdamW updates, so that learning rates for AdamW serve here


class NorMuon(MatrixOptimizer):
    """NorMuon (Li et al. 2025, arXiv 2510.05491).

    A parameter W [m, n] whose rows are neurons, with gradient G, takes the step

        M = beta1 M + (1 - beta1) G             [m, n]
        O = NewtonSchulz(M)                     about U V^T of the singular value decomposition
        v = beta2 v + (1 - beta2) mean(O^2)     [m, 1], the mean of each row
        D = O / (sqrt(v) + eps)
        W = (1 - lr weight_decay) W - 0.2 lr sqrt(m n) / |D| D

    The last factor gives the update the root mean square 0.2, whatever its shape.

    State of a parameter: `momentum_buffer` (M) [m, n] and `second_moment` (v) [m, 1], float32, or float64 for
    float64 parameters. There is no bias correction, as the scale of v cancels, and hence no counter.

    Args:
        params: matrices and stacks of matrices, of any floating dtype.
        lr: learning rate, as for AdamW.
        betas: beta1 and beta2, decay of the moments.
        eps: added to the root of v.
        ns_steps: iterations of Newton-Schulz.
        weight_decay: decoupled from the gradient, as in AdamW.
    """

    matrix_dims: ClassVar[int] = 2

    def __init__(
        self,
        params: ParamsT,
        lr: float = 3e-3,
        betas: tuple[float, float] = (0.95, 0.95),
        eps: float = 1e-8,
        ns_steps: int = 5,
        weight_decay: float = 0.1,
    ) -> None:
        if lr < 0.0 or weight_decay < 0.0:
            raise ValueError(f"lr and weight_decay must not be negative: {lr}, {weight_decay}")
        if not all(0.0 <= beta < 1.0 for beta in betas):
            raise ValueError(f"betas must be in [0, 1): {betas}")
        if eps <= 0.0:
            raise ValueError(f"eps must be positive: {eps}")
        if ns_steps < 1:
            raise ValueError(f"ns_steps must be at least 1: {ns_steps}")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "ns_steps": ns_steps, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    def first_state(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """The state of a matrix before its first step."""
        dtype = torch.promote_types(param.dtype, torch.float32)
        momentum = torch.zeros_like(param, dtype=dtype)
        return {"momentum_buffer": momentum, "second_moment": torch.zeros_like(param[:, :1], dtype=dtype)}

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """One step of one matrix."""
        momentum, second_moment = state["momentum_buffer"], state["second_moment"]
        beta1, beta2 = group["betas"]
        momentum.lerp_(grad.to(momentum.dtype), 1 - beta1)
        orthogonal = orthogonalize(momentum, group["ns_steps"]).to(momentum.dtype)
        second_moment.lerp_(orthogonal.square().mean(dim=1, keepdim=True), 1 - beta2)
        direction = orthogonal / (second_moment.sqrt() + group["eps"])
        size = direction.norm().clamp(min=group["eps"])  # a gradient of zeros gives zeros, not NaNs
        param.mul_(1 - group["lr"] * group["weight_decay"])
        param.add_(direction * (ADAM_RMS * param.numel() ** 0.5 / size), alpha=-group["lr"])


def orthogonalize(matrix: Tensor, steps: int) -> Tensor:
    """U V^T, roughly, of the singular value decomposition U S V^T of `matrix` [m, n], in bfloat16.

    The polynomial, applied again and again, drives singular values that are not tiny to somewhere between 0.7
    and 1.2. That they do not converge to 1 is the price of few steps.
    """
    a, b, c = QUINTIC
    x = matrix.bfloat16()
    tall = x.shape[0] > x.shape[1]
    if tall:  # so that the Gram matrix is the smaller one
        x = x.T
    x = x / x.norm().clamp(min=1e-7)  # no singular value is above 1 then
    for _ in range(steps):
        gram = x @ x.T
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, polynomial, x, beta=a)
    return x.T if tall else x
