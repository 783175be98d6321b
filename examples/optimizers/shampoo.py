"""Shampoo for one device: a matrix is preconditioned from the left and from the right."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from canzona_compile.optimizers.matrices import MatrixOptimizer


class Shampoo(MatrixOptimizer):
    """Shampoo (Gupta, Koren and Singer 2018, arXiv 1802.09568), the matrix case.

    A parameter W [m, n] with gradient G takes the step

        L = L + G G^T               [m, m], eps I at the start
        R = R + G^T G               [n, n], likewise
        U = L^(-1/4) G R^(-1/4)
        M = momentum M + U          [m, n], 0 at the start
        W = (1 - lr weight_decay) W - lr M

    The paper adds up statistics and never forgets, so step sizes shrink like Adagrad's. With `graft` U is
    rescaled to the Frobenius norm of G: its direction is Shampoo's, its size that of a step of SGD.

    State of a parameter: `step` (int, updates so far), `left` and `left_root` [m, m], `right` and
    `right_root` [n, n], `momentum_buffer` [m, n]. Tensors are float32, or float64 for float64 parameters.

    Args:
        params: matrices and stacks of matrices, of any floating dtype. `load_state_dict` casts state to the dtype of
            its parameter, as for all of torch's optimizers, and 16 bits are too few for these decompositions: only
            state of float32 and float64 parameters can be restored.
        lr: learning rate.
        momentum: of the preconditioned gradients; 0.0 for none.
        eps: smallest eigenvalue of L and R.
        every: steps for which the inverse roots are kept; they are what is expensive.
        graft: take the size of the update from the gradient.
        weight_decay: decoupled from the gradient, as in AdamW.
    """

    matrix_dims: ClassVar[int] = 2

    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.03,
        momentum: float = 0.9,
        eps: float = 1e-4,
        every: int = 10,
        graft: bool = False,
        weight_decay: float = 0.0,
    ) -> None:
        if lr < 0.0 or weight_decay < 0.0:
            raise ValueError(f"lr and weight_decay must not be negative: {lr}, {weight_decay}")
        if not 0.0 <= momentum < 1.0:
            raise ValueError(f"momentum must be in [0, 1): {momentum}")
        if eps <= 0.0:
            raise ValueError(f"eps must be positive: {eps}")
        if every < 1:
            raise ValueError(f"every must be at least 1: {every}")
        defaults = {"lr": lr, "momentum": momentum, "eps": eps, "every": every}
        super().__init__(params, {**defaults, "graft": graft, "weight_decay": weight_decay})

    def first_state(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """The state of a matrix before its first step."""
        rows, columns = param.shape
        wide = param.new_empty(0, dtype=torch.promote_types(param.dtype, torch.float32))
        return {
            "step": 0,
            "left": wide.new_full((rows,), group["eps"]).diag(),
            "right": wide.new_full((columns,), group["eps"]).diag(),
            "left_root": wide.new_zeros(rows, rows),
            "right_root": wide.new_zeros(columns, columns),
            "momentum_buffer": wide.new_zeros(rows, columns),
        }

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """One step of one matrix."""
        grad = grad.to(state["left"].dtype)
        state["left"].addmm_(grad, grad.T)
        state["right"].addmm_(grad.T, grad)
        if state["step"] % group["every"] == 0:  # so the first step, too
            state["left_root"].copy_(inverse_fourth_root(state["left"], group["eps"]))
            state["right_root"].copy_(inverse_fourth_root(state["right"], group["eps"]))
        state["step"] += 1
        direction = state["left_root"] @ grad @ state["right_root"]
        if group["graft"]:
            smallest = torch.finfo(direction.dtype).tiny  # a gradient of zeros gives zeros, not NaNs
            direction.mul_(grad.norm() / direction.norm().clamp(min=smallest))
        state["momentum_buffer"].mul_(group["momentum"]).add_(direction)
        param.mul_(1 - group["lr"] * group["weight_decay"])
        param.add_(state["momentum_buffer"], alpha=-group["lr"])


def inverse_fourth_root(matrix: Tensor, eps: float) -> Tensor:
    """`matrix`^(-1/4) for a symmetric matrix [d, d] whose eigenvalues are at least `eps`."""
    eigenvalues, eigenvectors = torch.linalg.eigh(matrix)
    # Next to large eigenvalues small ones are lost in rounding, and may even come out negative.
    root: Tensor = eigenvectors * eigenvalues.clamp(min=eps).pow(-0.25) @ eigenvectors.T
    return root
