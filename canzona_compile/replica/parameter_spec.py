"""What a step can see of a parameter besides its values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from canzona_compile.ir.layout import Shape
from canzona_compile.ir.printer import dtype_name
from canzona_compile.tensors import plain_attributes


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """What the step can see of a parameter besides its values.

    Attributes:
        marks: the attributes that users gave to it, see `plain_attributes`.
        part: whether it stands for some entries of a stack. Their number differs between ranks, so their kinds are
            apart from those that all ranks have: one could not tell from a name otherwise that it is the same code.
    """

    shape: Shape
    dtype: torch.dtype
    grad_dtype: torch.dtype
    device: torch.device
    marks: tuple[tuple[str, Any], ...] = ()
    part: bool = False
    _as_text: tuple[str, ...] = field(init=False, repr=False)  # of the marks: 1, 1.0 and True are equal, and no text is

    def __post_init__(self) -> None:
        object.__setattr__(self, "_as_text", tuple(repr(value) for _, value in self.marks))

    @classmethod
    def of(cls, param: Tensor, shape: Shape | None = None, grad_dtype: torch.dtype | None = None) -> ParameterSpec:
        """Describe a parameter.

        Args:
            shape: that of the whole parameter; None for that of `param`.
            grad_dtype: the dtype of its gradient; None for that of the gradient that it has now, if it has one.
        """
        if grad_dtype is None:
            grad_dtype = param.dtype if param.grad is None else param.grad.dtype
        shape = tuple(param.shape) if shape is None else shape
        marks = tuple(sorted(plain_attributes(param).items()))
        return cls(shape, param.dtype, grad_dtype, param.device, marks)

    @property
    def dims(self) -> str:
        """The shape as text, such as 64x32; empty for a scalar."""
        return "x".join(map(str, self.shape))

    @property
    def dtype_name(self) -> str:
        """The name of the dtype, such as bfloat16."""
        return dtype_name(self.dtype)

    def parameter(self, values: Callable[[torch.dtype], Tensor]) -> Tensor:
        """Make such a parameter.

        Args:
            values: makes a tensor of `shape` and of a dtype; it is called for the parameter and then for its gradient.
        """
        param = torch.nn.Parameter(values(self.dtype))
        if self.grad_dtype != self.dtype:
            param.grad_dtype = self.grad_dtype
        param.grad = values(self.grad_dtype)
        vars(param).update(self.marks)
        return param


@dataclass(frozen=True, eq=False, slots=True)
class ParamExample:
    """A parameter on which the optimizer's code is captured.

    Attributes:
        spec: its shape, dtypes and device.
        state: its portable state, of which only the form matters; None if it has none yet.
    """

    group: Mapping[str, Any]
    spec: ParameterSpec
    name: str
    state: Mapping[str, Any] | None = None
