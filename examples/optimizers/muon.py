"""Muon for matrices and for stacks of matrices, such as experts; its arithmetic is that of `torch.optim.Muon`.

Source: K. Jordan, "Muon: An optimizer for hidden layers in neural networks", 2024; torch's implementation of it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from canzona_compile.optimizers.matrices import add_matrices

STEP = inspect.unwrap(torch.optim.Muon.step)  # without the hooks, which the step around it has


class Muon(torch.optim.Muon):
    """torch's Muon, which also takes stacks `[..., M, N]` and steps each of their matrices as if it were alone.

    A 2-D parameter gets the bits that `torch.optim.Muon` gives it, and each matrix of a stack those that it gives this
    matrix alone. The factor of the learning rate depends on the last two dims.

    A convolution `[outputs, inputs, height, width]` is one matrix, `[outputs, inputs * height * width]`, in a parameter
    group with `"matrix_dims": 4`: that many dims make up one matrix, and those before count matrices. In a group with
    `"rows_are_inputs": True`, matrices are [inputs, outputs], as in GPT-2, and are stepped transposed.

    Args:
        params: parameters of two dims or more, in any memory format: matrices are flattened by index.
        options: the other arguments of `torch.optim.Muon`: `lr`, `weight_decay`, `momentum`, `nesterov`,
            `ns_coefficients`, `eps`, `ns_steps`, `adjust_lr_fn`.

    Raises:
        ValueError: a parameter has fewer than two dims, or torch refuses an argument.
    """

    matrix_dims: ClassVar[int] = 2  # what a parameter has in addition counts matrices that are stepped one by one

    def __init__(self, params: Any, lr: Any = 1e-3, **options: Any) -> None:
        # torch's refuses stacks, so one matrix has the arguments checked.
        checked = torch.optim.Muon([torch.empty(1, 1, device="cpu")], lr, **options)
        Optimizer.__init__(self, params, checked.defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, if Muon takes all of its parameters."""
        add_matrices(self, super().add_param_group, param_group)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update every parameter that has a gradient; returns the loss of `closure`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # No view flattens a convolution in channels_last by index, so a contiguous copy of it is stepped.
        groups = [group for group in self.param_groups if group.get("matrix_dims", self.matrix_dims) > 2]
        params = [p for group in groups for p in group["params"] if p.grad is not None and not p.is_contiguous()]
        memory = [param.data for param in params]
        for param in params:
            param.data = param.data.contiguous()
        try:
            STEP(self)
        finally:
            for param, own in zip(params, memory, strict=True):
                param.data = own.copy_(param)
        return loss

    def _init_group(
        self, group: Any, params_with_grad: list[Tensor], grads: list[Tensor], muon_momentum_bufs: list[Tensor]
    ) -> bool:
        """List the matrices that have gradients. Those of a stack are views, so that updates reach the stack."""
        params: list[Tensor] = []
        stacks: list[Tensor] = []
        buffers: list[Tensor] = []
        found: bool = super()._init_group(group, params, stacks, buffers)
        dims = group.get("matrix_dims", self.matrix_dims)
        for param, grad, buffer in zip(params, stacks, buffers, strict=True):
            if dims > 2:
                self.state[param]["momentum_buffer"] = buffer = buffer.contiguous()
            turned = group.get("rows_are_inputs", False)
            for found_in, listed in ((param, params_with_grad), (grad, grads), (buffer, muon_momentum_bufs)):
                listed.extend(one.mT if turned else one for one in matrices(found_in, dims))
        return found


def matrices(stack: Tensor, dims: int) -> Iterator[Tensor]:
    """The matrices of a stack, as views of it if it is contiguous; the last `dims` of its dims make up one matrix."""
    if stack.ndim > dims:
        for part in stack.unbind():
            yield from matrices(part, dims)
    else:
        yield stack if stack.ndim == 2 else stack.reshape(len(stack), -1)
