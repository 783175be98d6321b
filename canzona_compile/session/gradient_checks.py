"""Which gradients can take part in a step."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

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


def check_attributes(grad: Tensor, name: str) -> None:
    """Refuse a gradient to which users gave attributes: its owner gets a copy without them.

    Raises:
        InvalidGradient: it has some.
    """
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
