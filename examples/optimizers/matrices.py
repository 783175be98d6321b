"""What optimizers of matrices have in common: the step of a matrix, and of stacks of matrices, such as experts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer


class MatrixOptimizer(Optimizer):
    """Steps every matrix by itself, and each matrix of a stack `[..., M, N]` as if it were alone.

    A matrix of a stack gets the bits that it would get as a parameter of its own. State of a stack: tensors of its
    matrices one after the other, `[..., *shape]`, and what is no tensor once for all.

    A subclass says `matrix_dims = 2` itself, once it has said what is done to one matrix: what has code beyond a class
    that says it is not believed to do the same.

    Raises:
        ValueError: a parameter has fewer than two dims.
    """

    updates_at_once: ClassVar[bool] = True  # whether the first gradient makes an update, and not the state alone

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, if all of its parameters are matrices or stacks of them."""
        super().add_param_group(param_group)
        for param in self.param_groups[-1]["params"]:
            if param.ndim < 2:
                self.param_groups.pop()
                kind = type(self).__name__
                raise ValueError(f"{kind} takes matrices and stacks of matrices, not shape {list(param.shape)}")

    def first_state(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """The state of a matrix [m, n], as its first gradient finds it."""
        raise NotImplementedError

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Step one matrix [m, n], and write its new state into `state`."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient; returns the loss of `closure`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if param.ndim > 2:
                    self.step_stack(param, param.grad, state, group)
                    continue
                new = not state
                if new:
                    state.update(self.first_state(param, param.grad, group))
                if not new or self.updates_at_once:
                    self.update(param, param.grad, state, group)
        return loss

    def step_stack(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Step each matrix of a stack; a stack of none steps one of zeros, for the sake of counters."""
        lead, zeros = param.shape[:-2], param.new_zeros(param.shape[-2:])
        own = list(zip(entries(param, len(lead)), entries(grad, len(lead)), strict=True))
        pairs = own or [(zeros, zeros.to(grad.dtype))]
        new = not state
        if new:
            state.update(joined([self.first_state(*pair, group) for pair in pairs], lead))
        if new and not self.updates_at_once:
            return
        tensors = {name: entries(value, len(lead)) for name, value in state.items() if isinstance(value, Tensor)}
        numbers = {name: value for name, value in state.items() if name not in tensors}
        states = [{**numbers, **{name: values[i] for name, values in tensors.items()}} for i in range(len(own))]
        states = states or [{**self.first_state(*pairs[0], group), **numbers}]
        for pair, held in zip(pairs, states, strict=True):
            self.update(*pair, held, group)
        state.update({name: states[0][name] for name in numbers})


def entries(stack: Tensor, lead: int) -> list[Tensor]:
    """What lies under the first `lead` dims of a tensor, as views of it."""
    if not lead:
        return [stack]
    return [entry for part in stack.unbind() for entry in entries(part, lead - 1)]


def joined(states: Sequence[dict[str, Any]], lead: Sequence[int]) -> dict[str, Any]:
    """The state of a stack from those of its matrices, each of which lies as it lay alone."""
    return {
        name: one_after_the_other([state[name] for state in states], lead) if isinstance(value, Tensor) else value
        for name, value in states[0].items()
    }


def one_after_the_other(values: Sequence[Tensor], lead: Sequence[int]) -> Tensor:
    """Tensors of equal shape and strides as one [*lead, *shape]."""
    one, count = values[0], math.prod(lead)
    strides = [one.numel() * math.prod(lead[i + 1 :]) for i in range(len(lead))]
    whole = one.new_empty_strided((*lead, *one.shape), (*strides, *one.stride()))
    for place, value in zip(entries(whole, len(lead)), values[:count], strict=True):
        place.copy_(value)
    return whole
