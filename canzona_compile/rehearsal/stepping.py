"""The way to step a miniature that is compared with the plain one: each parameter by itself, as a plan does."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar

from torch import Tensor, nn

from canzona_compile.compat.torch_private import without_function_modes
from canzona_compile.eager.cell import step_alone, whole_copy
from canzona_compile.eager.publish import Shadow
from canzona_compile.rehearsal.trial import Plainly
from canzona_compile.replica.homes import hypers
from canzona_compile.replica.miniature import Miniature
from canzona_compile.tensors import plain_attributes


class VisibleContext(enum.Enum):
    """What a step sees other than a copy of its parameter, as the reason for a refusal."""

    NONE = "steps one parameter as all"
    ITSELF = "asks which object its parameter is, for its address, or for its strides"
    ATTRIBUTES = "reads attributes of its parameter that are private, or neither numbers nor strings"
    GROUP = "reads the position of a parameter in its group, or the number of parameters of the group"
    ALL_GROUPS = "reads the hyperparameters or the number of other parameter groups"


class OneByOne(Plainly):
    """Steps each parameter by itself on a twin, as the owners of its matrices do.

    Args:
        in_order: whether parameters step in their order, as random numbers come in it. Otherwise the last one is the
            first, so that what one step leaves to the next shows.
    """

    asks: ClassVar[bool] = False

    def __init__(self, counters: bool, in_order: bool = False, company: VisibleContext = VisibleContext.NONE) -> None:
        self.counters, self.in_order, self.company = counters, in_order, company

    def begin(self, small: Miniature) -> None:
        """Get ready."""
        self.small, self._shadow = small, Shadow(small.optimizer)

    def step(self) -> None:
        """Step all parameters that have gradients."""
        params = self.small.params
        with hidden(params) as grads:
            for i in range(len(params)) if self.in_order else reversed(range(len(params))):
                if grads[i] is not None:
                    self._step_one(i, grads)
                    with without_function_modes():
                        drop_gradients(params)  # that the step gave to others
        if self.counters:
            self._shadow.count()

    def _step_one(self, index: int, grads: list[Tensor | None]) -> None:
        small, company = self.small, self.company
        param, optimizer, grad = small.params[index], small.optimizer, grads[index]
        assert grad is not None
        attributes = vars(param) if company is VisibleContext.ATTRIBUTES else plain_attributes(param)
        own = param if company is VisibleContext.ITSELF else whole_copy(param, grad, attributes)
        g = small.group_of[index]
        groups = [
            {**hypers(group), "params": [own if p is param else without_gradient(p) for p in group["params"]]}
            for h, group in enumerate(optimizer.param_groups)
            if company is VisibleContext.ALL_GROUPS or (company is VisibleContext.GROUP and h == g)
        ]
        if own is param:
            param.grad = grad
        param.data.copy_(step_alone(optimizer, optimizer.param_groups[g], own, optimizer.state[param], groups))
        if own is param:
            grads[index] = param.grad


@contextlib.contextmanager
def hidden(params: Sequence[Tensor]) -> Iterator[list[Tensor | None]]:
    """Inside this context, parameters have no gradients: what an optimizer does to them beside its step shows."""
    with without_function_modes():
        grads = [param.grad for param in params]
        drop_gradients(params)
    try:
        yield grads
    finally:
        with without_function_modes():
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad


def drop_gradients(params: Iterable[Tensor]) -> None:
    """Let parameters have no gradients."""
    for param in params:
        if param.grad is not None:
            param.grad = None


def without_gradient(param: nn.Parameter) -> nn.Parameter:
    """Copy a parameter that does not step."""
    made = nn.Parameter(param.detach().clone(), requires_grad=param.requires_grad)
    vars(made).update(plain_attributes(param))
    return made
