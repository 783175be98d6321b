"""gemm_axpby: alpha * X + beta * F @ X, or X @ F, and if wanted the update of the parameters by it.

The last product of a Newton-Schulz step. `baddbmm` first copies X to its result, to add the product there; the
Triton kernel does not, and is alone in that: the library has no product whose summand lies elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from canzona_compile.kernels.dispatch import Choice, Operation, Problem, record
from canzona_compile.kernels.tensor_args import (
    Scalar,
    alignment,
    batched,
    decide,
    guard,
    matrices,
    on_device,
    on_host,
    runnable,
)


@dataclass(frozen=True, slots=True)
class Update:
    """param <- (1 - lr * weight_decay) * param - lr * scale * Y, in place.

    param: [..., m, n] for a Y of [..., M, N] with m <= M and n <= N; what is beyond m and n is padding.
    lr, weight_decay, scale: numbers, or 0-d tensors, of which those on the device are not waited for.
    """

    param: Tensor
    lr: Scalar
    weight_decay: Scalar = 0.0
    scale: Scalar = 1.0


def gemm_axpby(
    factor: Tensor,
    x: Tensor,
    *,
    alpha: Scalar = 1.0,
    beta: Scalar = 1.0,
    right: bool = False,
    out: Tensor | None = None,
    update: Update | None = None,
    choice: Choice | None = None,
) -> Tensor:
    """Y = alpha * X + beta * (F @ X), or alpha * X + beta * (X @ F) with `right`.

    Sums are kept in float32 (float64 in float64) and rounded to x's dtype once; the library rounds the product
    once more where alpha or beta is on the device.

    Args:
        factor: [..., M, M], or [..., N, N] with `right`.
        x: [..., M, N], of factor's dtype, any strides.
        alpha, beta: numbers, or 0-d tensors; on the device, nobody waits for them.
        out: [..., M, N] of x's dtype; must not overlap factor or x.
        update: apply Y, rounded to x's dtype, to a parameter and do not return it. Not together with `out`.
        choice: which kernel; default: what `dispatch` chooses. For tests and the tuner.

    Leading dims are broadcast against each other.

    Returns: Y, or the parameter if there is an update.

    Raises:
        TypeError: an operand is not floating point, or dtypes differ.
        ValueError: shapes or devices do not fit, or the given choice cannot run here.
    """
    matrices("x", x)
    m, n = x.shape[-2:]
    side = n if right else m
    matrices("factor", factor, (side, side), x)
    if factor.dtype != x.dtype:
        raise TypeError(f"factor is {factor.dtype}, x is {x.dtype}: one dtype is needed")
    batch = torch.broadcast_shapes(factor.shape[:-2], x.shape[:-2])
    f, v = batched(factor, batch), batched(x, batch)
    if update is None:
        target = x.new_empty(*batch, m, n) if out is None else out
        matrices("out", target, (m, n), x)
        if target.shape[:-2] != batch or target.dtype != x.dtype:
            raise ValueError(f"out is {target.dtype} {tuple(target.shape)}, not {x.dtype} {(*batch, m, n)}")
        if target.numel() and target.data_ptr() in (x.data_ptr(), factor.data_ptr()):
            raise ValueError("out is x or factor: both are read while it is written")
    else:
        target = _checked(update, out, x, batch)
    if target.numel() == 0:
        return target

    result = batched(target, batch)
    op: Operation = "gemm_axpby" if update is None else "gemm_update"
    level = _alignment(side, f, v, result)
    problem = Problem(op, v.shape[0], side, m if right else n, x.dtype, target.dtype, level)
    choice = choice or decide(problem, x.device)
    record(problem, choice)
    if choice.tile is None:
        _library(f, v, result, on_host(alpha), on_host(beta), right, update)
    else:
        _triton(choice, f, v, result, alpha, beta, right, update)
    if result.data_ptr() != target.data_ptr():  # its leading dims have no common stride
        target.copy_(result.view(target.shape))
    return target


def reference(
    factor: Tensor,
    x: Tensor,
    *,
    alpha: Scalar = 1.0,
    beta: Scalar = 1.0,
    right: bool = False,
    out: Tensor | None = None,
    update: Update | None = None,
) -> Tensor:
    """The same in plain torch, in float32 (float64 in float64)."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    product = x.to(wide) @ factor.to(wide) if right else factor.to(wide) @ x.to(wide)
    y = (alpha * x.to(wide) + beta * product).to(x.dtype)
    if update is None:
        return y if out is None else out.copy_(y)
    param = update.param
    step = y[..., : param.shape[-2], : param.shape[-1]].to(wide)
    kept = (1.0 - update.lr * update.weight_decay) * param.to(wide)
    return param.copy_(kept - update.lr * update.scale * step)


def _checked(update: Update, out: Tensor | None, x: Tensor, batch: torch.Size) -> Tensor:
    param = update.param
    if out is not None:
        raise ValueError("out and update: Y is either returned or applied")
    matrices("update.param", param, like=x)
    rows, columns = param.shape[-2:]
    if param.shape[:-2] != batch or rows > x.shape[-2] or columns > x.shape[-1]:
        raise ValueError(f"update.param is {tuple(param.shape)}, which is no corner of {(*batch, *x.shape[-2:])}")
    return param


def _alignment(side: int, f: Tensor, x: Tensor, target: Tensor) -> int:
    if (x.stride(2) == 1) != (target.stride(2) == 1):
        return 1  # tiles would have to be transposed on the way
    least = alignment(f, x, target)
    return min(least, 8) if side % 16 else least


def _triton(
    choice: Choice,
    f: Tensor,
    x: Tensor,
    target: Tensor,
    alpha: Scalar,
    beta: Scalar,
    right: bool,
    update: Update | None,
) -> None:
    from canzona_compile.kernels.triangle import INTERPRETED  # late: everything else works without Triton

    runnable(choice, x, INTERPRETED)
    assert choice.tile is not None
    if choice.kernel == "tma":
        if update is not None:
            raise ValueError("tma: an update is applied by the pointer kernel only")
        if _alignment(8, f, x, target) < 8:
            raise ValueError("tma: rows have to begin at multiples of 16 bytes, and out has to lie as x does")
        from canzona_compile.kernels.gemm_axpby_tma import launch as launch_tma

        operands = (x, f) if right else (f, x)
        with guard(x):
            launch_tma(choice.tile, *operands, x, target, (on_device(alpha, x), on_device(beta, x)))
        return
    from canzona_compile.kernels.gemm_axpby_pointer import launch

    rest = (0.0, 0.0, 0.0) if update is None else (update.lr, update.weight_decay, update.scale)
    scalars = tuple(on_device(s, x) for s in (alpha, beta, *rest))
    if right:  # X @ F is the transpose of F^T @ X^T, which strides can say
        f, x, target = f.mT, x.mT, target.mT
    with guard(x):
        launch(choice.tile, f, x, target if update is None else None, None if update is None else target, scalars)


def _library(
    f: Tensor, x: Tensor, target: Tensor, alpha: Scalar, beta: Scalar, right: bool, update: Update | None
) -> None:
    """Batched products of the library; target is Y, or the parameter."""
    first, second = (x, f) if right else (f, x)
    y = torch.empty_like(x, memory_format=torch.contiguous_format) if update is not None else target
    if isinstance(alpha, Tensor) or isinstance(beta, Tensor):
        y.copy_(alpha * x + beta * torch.bmm(first, second))
    else:
        torch.baddbmm(x, first, second, beta=alpha, alpha=beta, out=y)
    if update is None:
        return
    lr, decay, scale = (on_host(s) for s in (update.lr, update.weight_decay, update.scale))
    keep, rate = 1.0 - lr * decay, lr * scale
    step = y[:, : target.shape[1], : target.shape[2]]
    target.mul_(keep)
    if isinstance(rate, Tensor):
        target.sub_(step.float() * rate)
    else:
        target.add_(step, alpha=-rate)
