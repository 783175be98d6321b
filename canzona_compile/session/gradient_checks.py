"""Which gradients can take part in a step."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from canzona_compile.capture.asked import lies_otherwise
from canzona_compile.errors import InvalidGradient, some
from canzona_compile.ir.layout import local_part


def check_gradient(param: Tensor, name: str, expected: torch.dtype) -> None:
    """Refuse a gradient that cannot take part in this step.

    Args:
        param: a parameter with a gradient.
        name: the name of the parameter, for the error.
        expected: the dtype of the gradient that the plan was made for.

    Raises:
        InvalidGradient: the gradient is sparse or complex, has other placements than its parameter, or has another
            shape or dtype than planned.
    """
    grad = param.grad
    assert grad is not None
    if grad.layout is not torch.strided:
        raise InvalidGradient(
            f"the gradient is {grad.layout}, not dense",
            at=name,
            hint="use sparse=False in the embedding, or keep this parameter in another optimizer",
        )
    if grad.is_complex():
        raise InvalidGradient("the gradient is complex", at=name)
    if isinstance(param, DTensor) and not (isinstance(grad, DTensor) and grad.placements == param.placements):
        raise InvalidGradient(
            f"the gradient is laid out as {getattr(grad, 'placements', 'a plain tensor')}, "
            f"the parameter as {param.placements}",
            at=name,
            hint="redistribute the gradient to the parameter's placements before step()",
        )
    if local_part(grad).shape != local_part(param).shape:
        raise InvalidGradient(
            f"the gradient's fragment is {list(local_part(grad).shape)}, the parameter's "
            f"{list(local_part(param).shape)}",
            at=name,
        )
    if grad.dtype != expected:
        raise InvalidGradient(f"the gradient is {grad.dtype}; the plan was made for {expected}", at=name)


def check_attributes(grad: Tensor, name: str, asked: Collection[str] = ()) -> None:
    """Refuse a gradient of which its owner gets a copy that is unlike it: contiguous, without users' attributes.

    Args:
        grad: the gradient.
        name: the name of its parameter.
        asked: what the optimizer asks about the layout of gradients in memory, see `LayoutQuestions`.

    Raises:
        InvalidGradient: it has attributes, or it is not contiguous and the optimizer asks that.
    """
    if asked and lies_otherwise(local_part(grad), asked):
        raise InvalidGradient(
            "the optimizer's step asks for the strides of gradients, or whether they are contiguous; this one is not, "
            "and its owner gets a contiguous copy",
            at=name,
            hint="make gradients contiguous before step()",
        )
    own = [attribute for attribute in vars(grad) if not attribute.startswith("_")]
    if own:
        raise InvalidGradient(
            f"the gradient has attributes that a step may read: {some(own)}",
            at=name,
            hint="keep what belongs to a parameter in attributes of the parameter",
        )


def check_main_gradients(params: Mapping[str, Tensor]) -> None:
    """Raise if gradients are where no optimizer looks for them. Call this if no parameter has one.

    Raises:
        InvalidGradient: a framework keeps gradients in `main_grad`.
    """
    if found := [name for name, param in params.items() if isinstance(getattr(param, "main_grad", None), Tensor)]:
        raise InvalidGradient(
            "no parameter has a gradient; main_grad, which has one, is not read",
            at=some(found),
            hint="set param.grad = param.main_grad (in the dtype of the parameter) before step()",
        )
