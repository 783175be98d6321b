"""What optimizers of matrices have in common: the step of a matrix, and of stacks of matrices, such as experts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer


class MatrixOptimizer(Optimizer):
    """Steps every matrix by itself, and each matrix of a stack `[..., M, N]` as if it were alone.

    A matrix of a stack gets the bits that it would get as a parameter of its own. State of a stack: tensors of its
    matrices one after the other, `[..., *shape]`, and what is no tensor once for all.

    A convolution `[outputs, inputs, height, width]` is one matrix in a parameter group with `"matrix_dims": 4`, see
    `canzona_compile.optimizers.Muon`. Its state has the shape of the parameter where it would have that of the matrix.
    In a group with `"rows_are_inputs": True`, matrices are [inputs, outputs], and are stepped transposed.

    A subclass says `matrix_dims = 2` itself, once it has said what is done to one matrix: what has code beyond a class
    that says it is not believed to do the same.

    Raises:
        ValueError: a parameter has fewer than two dims.
    """

    matrix_dims: ClassVar[int] = 2
    updates_at_once: ClassVar[bool] = True  # whether the first gradient makes an update, and not the state alone

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, if all of its parameters are matrices or stacks of them."""
        add_matrices(self, super().add_param_group, param_group)

    def first_state(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """The state of a matrix [m, n], as its first gradient finds it."""
        raise NotImplementedError

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Step one matrix [m, n]: change it and the tensors of `state` in place, and put its numbers into `state`."""
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
                if param.ndim > 2 or group.get("rows_are_inputs", False):
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
        stack = MatrixStack.of(param, group.get("matrix_dims", self.matrix_dims), group.get("rows_are_inputs", False))
        copied = stack.flattens and not param.is_contiguous()
        own = param.contiguous() if copied else param  # no view flattens a convolution in channels_last by index
        pairs = list(zip(stack.entries(own), stack.entries(grad), strict=True))
        zeros = param.new_zeros(stack.matrix)
        some = pairs or [(zeros, zeros.to(grad.dtype))]
        new = not state
        if new:
            state.update(stack.joined([self.first_state(*pair, group) for pair in some]))
        if new and not self.updates_at_once:
            return
        held = {name: value for name, value in state.items() if isinstance(value, Tensor)}
        for name in [name for name, value in held.items() if stack.flattens and not value.is_contiguous()]:
            state[name] = held[name] = held[name].contiguous()  # a checkpoint may have it in channels_last, too
        tensors = {name: stack.entries(value, stack.is_alike(value)) for name, value in held.items()}
        numbers = {name: value for name, value in state.items() if name not in tensors}
        states = [{**numbers, **{name: values[i] for name, values in tensors.items()}} for i in range(len(pairs))]
        states = states or [{**numbers, **{name: stack.of_none(value) for name, value in held.items()}}]
        for pair, one in zip(some, states, strict=True):
            self.update(*pair, one, group)
        state.update({name: states[0][name] for name in numbers})
        if copied:
            param.copy_(own)


def add_matrices(optimizer: Optimizer, add: Callable[[dict[str, Any]], None], param_group: dict[str, Any]) -> None:
    """Let `add` add a parameter group to an optimizer, if all of its parameters are matrices or stacks of them."""
    dims = param_group.get("matrix_dims", 2)
    if type(dims) is not int or dims < 2:
        raise ValueError(f"matrix_dims={dims!r} is not an integer of at least 2")
    add(param_group)
    for param in optimizer.param_groups[-1]["params"]:
        if param.ndim < 2:
            optimizer.param_groups.pop()
            kind = type(optimizer).__name__
            raise ValueError(f"{kind} takes matrices and stacks of matrices, not shape {list(param.shape)}")


@dataclass(frozen=True)
class MatrixStack:
    """A stack of matrices, or a convolution, which is one matrix `[outputs, inputs * height * width]`.

    Attributes:
        lead: the dims that count matrices.
        one: the other dims.
        turned: whether matrices are stepped transposed.
    """

    lead: tuple[int, ...]
    one: tuple[int, ...]
    turned: bool = False

    @classmethod
    def of(cls, param: Tensor, dims: int, turned: bool) -> MatrixStack:
        """The last `dims` dims of a parameter make up one matrix."""
        count = max(0, param.ndim - dims)
        return cls(tuple(param.shape[:count]), tuple(param.shape[count:]), turned)

    @property
    def flat(self) -> tuple[int, int]:
        """The shape of a matrix in the parameter, if it has two dims there."""
        return self.one[0], math.prod(self.one[1:])

    @property
    def matrix(self) -> tuple[int, int]:
        """The shape of a matrix as it is stepped."""
        return (self.flat[1], self.flat[0]) if self.turned else self.flat

    @property
    def flattens(self) -> bool:
        """Whether a matrix has more dims than two in its parameter."""
        return len(self.one) > 2

    def entries(self, value: Tensor, alike: bool = True) -> list[Tensor]:
        """What a tensor has for each matrix, as views of it.

        Args:
            alike: whether what it has is as the matrix is; if not, it is no part of a parameter.
        """
        found = [value]
        for _ in self.lead:
            found = [entry for part in found for entry in part.unbind()]
        if not alike:
            return found
        found = [entry.reshape(self.flat) for entry in found]
        return [entry.mT for entry in found] if self.turned else found

    def is_alike(self, value: Tensor) -> bool:
        """Whether a tensor of the state has the shape of the parameter."""
        return tuple(value.shape) == (*self.lead, *self.one)

    def of_none(self, value: Tensor) -> Tensor:
        """What a matrix of zeros would have in place of a tensor of a stack of no matrices."""
        return value.new_zeros(self.matrix if self.is_alike(value) else value.shape[len(self.lead) :])

    def joined(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The state of the stack from those of its matrices: tensors lie one after the other, each as it lay alone."""
        found = dict(states[0])
        for name in [name for name, value in found.items() if isinstance(value, Tensor)]:
            values = [state[name] for state in states]
            lies = values[0]
            alike = tuple(lies.shape) == self.matrix
            moved = alike and (self.turned or self.flattens)  # it lies as the parameter does
            shape = self.one if moved else lies.shape
            strides = torch.empty(shape, device="meta").stride() if moved else lies.stride()
            leading = [math.prod(self.lead[i + 1 :]) * lies.numel() for i in range(len(self.lead))]
            found[name] = lies.new_empty_strided((*self.lead, *shape), (*leading, *strides))
            for place, value in zip(self.entries(found[name], alike), values, strict=False):  # none has no place
                place.copy_(value)
        return found
