"""Fused parameters: the optimizer sees each of their logical matrices as a parameter of its own.

The parameter of a piece holds this rank's rows of the piece. If these rows are contiguous in the fused fragment, it
is a view of that fragment; otherwise it is a copy that is written back after the step. While a plan is in use,
`optimizer.state` holds the state of a piece under the piece's parameter.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.distributed.tensor import DTensor

from canzona_compile.ir.layout import local_part
from canzona_compile.session.division import Division


class Fused:
    """A parameter that holds several logical matrices, and the parameters that stand for them.

    Attributes:
        division: which rows are those of which matrix.
        params: the parameters that stand for its pieces, in their order.
    """

    def __init__(self, division: Division, params: Sequence[Tensor]) -> None:
        self.division, self.params = division, tuple(params)

    def take(self) -> None:
        """Give the pieces the current values of the fused parameter and of its gradient."""
        division = self.division
        values, grad = local_part(division.whole), division.whole.grad
        for piece, param in zip(division.pieces, self.params, strict=True):
            local = piece.of(values)
            if isinstance(param, DTensor):
                param._local_tensor = local
            else:
                param.data = local
            if grad is None:
                param.grad = None
                continue
            if grad.dtype != param.dtype:
                param.grad_dtype = grad.dtype
            param.grad = division.like(piece.of(local_part(grad)), piece.shape)

    def give_back(self) -> None:
        """Write pieces that are copies back to the fused parameter, and drop the gradients of all pieces."""
        values = local_part(self.division.whole)
        for piece, param in zip(self.division.pieces, self.params, strict=True):
            param.grad = None
            piece.put(values, local_part(param))
