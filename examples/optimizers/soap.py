"""SOAP for one device: Adam in the eigenbasis of Shampoo's preconditioners."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from canzona_compile.optimizers.matrices import MatrixOptimizer


class SOAP(MatrixOptimizer):
    """SOAP (Vyas et al. 2024, arXiv 2409.11321, algorithm 3).

    A parameter W [m, n] with gradient G keeps averages L of G G^T and R of G^T G, and orthogonal matrices
    QL, QR whose columns are about their eigenvectors, those of large eigenvalues first. Its step t is

        M = beta1 M + (1 - beta1) G                             in the space of W
        V = beta2 V + (1 - beta2) (QL^T G QR)^2                 in the eigenbasis
        N = (QL^T M QR) / (sqrt(V / (1 - beta2^t)) + eps)
        W = (1 - lr weight_decay) W - lr / (1 - beta1^t) QL N QR^T

    and then L, R and, every few steps, QL and QR follow the gradient. A parameter's first gradient only
    finds the basis: no update is made with a basis that the gradient itself has chosen.

    State of a parameter: `step` (int, updates so far), `exp_avg` (M) and `exp_avg_sq` (V) [m, n], `left`
    and `left_basis` [m, m], `right` and `right_basis` [n, n]; a side that is too long has no entries.
    Tensors are float32, or float64 for float64 parameters.

    Args:
        params: matrices and stacks of matrices, of any floating dtype. `load_state_dict` casts state to the dtype of
            its parameter, as for all of torch's optimizers, and 16 bits are too few for these decompositions: only
            state of float32 and float64 parameters can be restored.
        lr: learning rate.
        betas: beta1 and beta2, decay of the moments.
        shampoo_beta: decay of L and R.
        eps: added to the root of V.
        every: steps for which the basis is kept.
        max_precond_dim: a longer side is not rotated; with both too long SOAP is Adam from the second gradient on.
        weight_decay: decoupled from the gradient, as in AdamW.
    """

    matrix_dims: ClassVar[int] = 2
    updates_at_once: ClassVar[bool] = False

    def __init__(
        self,
        params: ParamsT,
        lr: float = 3e-3,
        betas: tuple[float, float] = (0.95, 0.95),
        shampoo_beta: float = 0.95,
        eps: float = 1e-8,
        every: int = 10,
        max_precond_dim: int = 10_000,
        weight_decay: float = 0.01,
    ) -> None:
        if lr < 0.0 or weight_decay < 0.0 or eps < 0.0:
            raise ValueError(f"lr, weight_decay and eps must not be negative: {lr}, {weight_decay}, {eps}")
        if not all(0.0 <= beta < 1.0 for beta in (*betas, shampoo_beta)):
            raise ValueError(f"betas and shampoo_beta must be in [0, 1): {betas}, {shampoo_beta}")
        if every < 1:
            raise ValueError(f"every must be at least 1: {every}")
        defaults = {"lr": lr, "betas": betas, "shampoo_beta": shampoo_beta, "eps": eps, "every": every}
        super().__init__(params, {**defaults, "max_precond_dim": max_precond_dim, "weight_decay": weight_decay})

    def first_state(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """The state after a first gradient: statistics and basis, but no moments."""
        dtype = torch.promote_types(param.dtype, torch.float32)
        state: dict[str, Any] = {"step": 0}
        state["exp_avg"], state["exp_avg_sq"] = (torch.zeros_like(param, dtype=dtype) for _ in range(2))
        for side, dim in zip(("left", "right"), param.shape, strict=True):
            if dim <= group["max_precond_dim"]:
                state[side] = torch.zeros(dim, dim, dtype=dtype, device=param.device)
                state[f"{side}_basis"] = torch.zeros_like(state[side])
        average(state, grad.to(dtype), group["shampoo_beta"])
        for side in [name for name in ("left", "right") if name in state]:
            eigenvectors = torch.linalg.eigh(state[side]).eigenvectors
            state[f"{side}_basis"].copy_(eigenvectors.flip(1))  # largest eigenvalue first
        return state

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """One step of one matrix: Adam in the eigenbasis, then the basis itself."""
        exp_avg, exp_avg_sq = state["exp_avg"], state["exp_avg_sq"]
        beta1, beta2 = group["betas"]
        grad = grad.to(exp_avg.dtype)
        state["step"] += 1
        exp_avg.lerp_(grad, 1 - beta1)
        exp_avg_sq.lerp_(rotate(grad, state).square(), 1 - beta2)
        root = (exp_avg_sq / (1 - beta2 ** state["step"])).sqrt()
        direction = rotate_back(rotate(exp_avg, state) / (root + group["eps"]), state)
        param.mul_(1 - group["lr"] * group["weight_decay"])
        param.add_(direction, alpha=-group["lr"] / (1 - beta1 ** state["step"]))

        average(state, grad, group["shampoo_beta"])
        if state["step"] % group["every"] == 0:
            if "left" in state:
                exp_avg_sq.copy_(exp_avg_sq[refresh(state["left"], state["left_basis"])])
            if "right" in state:
                exp_avg_sq.copy_(exp_avg_sq[:, refresh(state["right"], state["right_basis"])])


def average(state: dict[str, Any], grad: Tensor, beta: float) -> None:
    """Let L and R follow the gradient."""
    if "left" in state:
        state["left"].lerp_(grad @ grad.T, 1 - beta)
    if "right" in state:
        state["right"].lerp_(grad.T @ grad, 1 - beta)


def rotate(matrix: Tensor, state: dict[str, Any]) -> Tensor:
    """QL^T matrix QR: into the eigenbasis."""
    if "left" in state:
        matrix = state["left_basis"].T @ matrix
    return matrix @ state["right_basis"] if "right" in state else matrix


def rotate_back(matrix: Tensor, state: dict[str, Any]) -> Tensor:
    """QL matrix QR^T: out of the eigenbasis."""
    if "left" in state:
        matrix = state["left_basis"] @ matrix
    return matrix @ state["right_basis"].T if "right" in state else matrix


def refresh(statistics: Tensor, basis: Tensor) -> Tensor:
    """Improve a basis by one step of power iteration and return where its vectors come from.

    QR keeps the vectors in order of the eigenvalues only if they are in that order before. What is stored
    per vector, the second moment, has to be reordered along with them.
    """
    product = statistics @ basis
    eigenvalues = (basis * product).sum(dim=0)
    order = eigenvalues.argsort(descending=True, stable=True)
    basis.copy_(torch.linalg.qr(product[:, order]).Q)
    return order
