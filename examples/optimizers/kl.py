"""KL-Shampoo and KL-SOAP for one device: Shampoo whose two factors are estimated together."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from canzona_compile.optimizers.matrices import MatrixOptimizer


class KLShampoo(MatrixOptimizer):
    """KL-Shampoo (Lin et al. 2025, arXiv 2509.03378).

    The factors L and R are those for which a normal distribution with the covariance of both is closest, by
    Kullback-Leibler divergence, to that of the gradient: each average is of gradients that the other factor has
    whitened. A parameter W [m, n] with gradient G keeps them, orthogonal matrices QL and QR whose columns are about
    their eigenvectors, and estimates l [m] and r [n] of their eigenvalues. A step is

        M = beta1 M + (1 - beta1) G
        W = (1 - lr weight_decay) (W - lr QL ((QL^T M QR) / (sqrt(l r^T) + eps)) QR^T)

    and then factors and eigenvalues follow the gradient, each by the other one as it was:

        L = beta2 L + (1 - beta2) / n  (G QR) diag(1 / r) (G QR)^T        and R likewise
        l = beta2 l + (1 - beta2)  mean over columns of (QL^T G QR)^2 / r  and r likewise

    Every few steps QL and QR take a step of power iteration. A parameter's first gradient only finds the bases: no
    update is made with bases that the gradient itself has chosen.

    After `optim/kl_opt.py` of github.com/yorkerlin/KL-Methods, with its defaults, for matrices. Other than there, work
    is in float32 and not in bfloat16; eigenvalues are kept, and not the inverses of their roots; moments stay in the
    space of W when bases turn. Damping of the factors, a decay of their own, updates without bounds on eigenvalues and
    normalized updates are left out. Both sides are always rotated: each takes two matrices of its length squared.

    State of a parameter: `step` (int, updates so far), `exp_avg` (M) [m, n], `left` and `left_basis` [m, m],
    `left_values` [m], and `right`, `right_basis` [n, n] and `right_values` [n]. Tensors are float32, or float64 for
    float64 parameters.

    Args:
        params: matrices and stacks of matrices, of any floating dtype. Only state of float32 and float64 parameters
            can be restored, see `SOAP`.
        lr: learning rate.
        betas: beta1 and beta2, decay of the moments and of the factors.
        eps: added to the roots.
        every: steps for which bases are kept.
        weight_decay: decoupled from the gradient.
        first_values: what l and r begin with.
        max_scale: estimates of eigenvalues are at least 1 / s^2, where s is the length of the side, but at least 10 and
            at most this.
    """

    matrix_dims: ClassVar[int] = 2
    updates_at_once: ClassVar[bool] = False

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.98),
        eps: float = 1e-8,
        every: int = 10,
        weight_decay: float = 0.01,
        first_values: float = 0.1,
        max_scale: float = 4000.0,
    ) -> None:
        if lr < 0.0 or weight_decay < 0.0 or eps < 0.0:
            raise ValueError(f"lr, weight_decay and eps must not be negative: {lr}, {weight_decay}, {eps}")
        if not all(0.0 <= beta < 1.0 for beta in betas):
            raise ValueError(f"betas must be in [0, 1): {betas}")
        if every < 1:
            raise ValueError(f"every must be at least 1: {every}")
        if first_values <= 0.0 or max_scale < 10.0:
            raise ValueError(f"first_values must be positive and max_scale at least 10: {first_values}, {max_scale}")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "every": every, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "first_values": first_values, "max_scale": max_scale})

    def first_state(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """The state after a first gradient: factors and bases, but no moments."""
        grad = grad.to(torch.promote_types(param.dtype, torch.float32))
        state: dict[str, Any] = {"step": 0, "exp_avg": torch.zeros_like(grad)}
        for side, own in (("left", grad), ("right", grad.T)):
            state[side] = own @ own.T * ((1 - group["betas"][1]) / own.shape[1])
            state[f"{side}_basis"] = torch.linalg.eigh(state[side]).eigenvectors.flip(1)  # largest eigenvalue first
            state[f"{side}_values"] = own.new_full(own.shape[:1], group["first_values"])
        return state

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """One step of one matrix, and then of its factors."""
        grad = grad.to(torch.promote_types(param.dtype, torch.float32))
        state["step"] += 1
        param.add_(self.direction(grad, state, group), alpha=-group["lr"])
        param.mul_(1 - group["lr"] * group["weight_decay"])
        follow(grad, state, group)

    def direction(self, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        """The update before the learning rate: the average of gradients, whitened by both factors."""
        state["exp_avg"].lerp_(grad, 1 - group["betas"][0])
        root = torch.outer(state["left_values"].sqrt(), state["right_values"].sqrt())
        return rotate_back(rotate(state["exp_avg"], state) / (root + group["eps"]), state)


class KLSOAP(KLShampoo):
    """KL-SOAP (Lin et al. 2025, arXiv 2509.03378): Adam, without bias correction, in the eigenbasis of KL-Shampoo.

    Its step is that of `KLShampoo` but for

        V = beta2 V + (1 - beta2) (QL^T G QR)^2
        W = (1 - lr weight_decay) (W - lr QL ((QL^T M QR) / (sqrt(V) + eps)) QR^T)

    State of a parameter: that of `KLShampoo`, and `exp_avg_sq` (V) [m, n].
    """

    matrix_dims: ClassVar[int] = 2

    def first_state(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """The state after a first gradient: factors and bases, but no moments."""
        state = super().first_state(param, grad, group)
        return {**state, "exp_avg_sq": torch.zeros_like(state["exp_avg"])}

    def direction(self, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        """The update before the learning rate: Adam's, in the eigenbasis."""
        state["exp_avg"].lerp_(grad, 1 - group["betas"][0])
        state["exp_avg_sq"].lerp_(rotate(grad, state).square(), 1 - group["betas"][1])
        return rotate_back(rotate(state["exp_avg"], state) / (state["exp_avg_sq"].sqrt() + group["eps"]), state)


def rotate(matrix: Tensor, state: dict[str, Any]) -> Tensor:
    """QL^T matrix QR: into the eigenbasis."""
    turned: Tensor = state["left_basis"].T @ matrix @ state["right_basis"]
    return turned


def rotate_back(matrix: Tensor, state: dict[str, Any]) -> Tensor:
    """QL matrix QR^T: out of the eigenbasis."""
    turned: Tensor = state["left_basis"] @ matrix @ state["right_basis"].T
    return turned


def follow(grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    """Let factors, eigenvalues and, every few steps, bases follow the gradient."""
    rate = 1 - group["betas"][1]
    left, right = state["left_values"].clone(), state["right_values"].clone()
    for side, own, other, values in (("left", grad, "right", right), ("right", grad.T, "left", left)):
        half = (own @ state[f"{other}_basis"]) * values.rsqrt()
        state[side].lerp_(half @ half.T / own.shape[1], rate)
        found = (state[f"{side}_basis"].T @ half).square().mean(dim=1)
        least = max(10.0, min(own.shape[0], group["max_scale"])) ** -2
        state[f"{side}_values"].lerp_(found, rate).clamp_(min=least)
    for side in ("left", "right") if state["step"] % group["every"] == 0 else ():
        state[f"{side}_basis"].copy_(torch.linalg.qr(state[side] @ state[f"{side}_basis"]).Q)
