"""The way to step a miniature that is compared with the plain one: each parameter by itself, as a plan does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar

from torch import Tensor

from canzona_compile.compat.torch_private import without_function_modes
from canzona_compile.eager.cell import step_alone, whole_copy
from canzona_compile.eager.publish import Shadow
from canzona_compile.rehearsal.trial import Plainly
from canzona_compile.replica.miniature import Miniature
from canzona_compile.tensors import plain_attributes


class OneByOne(Plainly):
    """Steps each parameter by itself on a twin, as the owners of its matrices do.

    Args:
        in_order: whether parameters step in their order, as random numbers come in it. Otherwise the last one is the
            first, so that what one step leaves to the next shows.
    """

    asks: ClassVar[bool] = False

    def __init__(self, counters: bool, in_order: bool = False) -> None:
        self.counters, self.in_order = counters, in_order

    def begin(self, small: Miniature) -> None:
        """Get ready."""
        self.small, self._shadow = small, Shadow(small.optimizer)

    def step(self) -> None:
        """Step all parameters that have gradients."""
        params = self.small.params
        with hidden(params) as grads:
            for i in range(len(params)) if self.in_order else reversed(range(len(params))):
                if (grad := grads[i]) is not None:
                    self._step_one(i, grad)
                    with without_function_modes():
                        drop_gradients(params)  # that the step gave to others
        if self.counters:
            self._shadow.count()

    def _step_one(self, index: int, grad: Tensor) -> None:
        param, optimizer = self.small.params[index], self.small.optimizer
        own = whole_copy(param, grad, plain_attributes(param))
        group = optimizer.param_groups[self.small.group_of[index]]
        param.data.copy_(step_alone(optimizer, group, own, optimizer.state[param]))


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
