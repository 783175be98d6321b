"""One parameter's step by itself, in more or less company. Rehearsals compare it with the step of all parameters."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from canzona_compile.capture.miniature import Miniature
from canzona_compile.capture.twin import hypers, make_twin, marks_of, step_plainly


class Company(enum.Enum):
    """What a step sees beside a copy of its parameter, as the reason for a refusal."""

    NONE = "steps one parameter as all"
    ITSELF = "asks which object its parameter is, for its address, or for its strides"
    ATTRIBUTES = "reads attributes of its parameter that are no numbers and no texts"
    GROUP = "reads the position of a parameter in its group, or the number of parameters of the group"
    ALL_GROUPS = "reads the hyperparameters or the number of other parameter groups"


def step_one(small: Miniature, index: int, company: Company) -> None:
    """Take the step of one parameter of a miniature on a twin, as the owner of a task does.

    Args:
        small: the miniature, which gets the new values and the new state.
        index: the index of the parameter, which has a gradient.
        company: what the step sees beside it. Other parameters have no gradient then.
    """
    param, optimizer = small.params[index], small.optimizer
    assert param.grad is not None
    own = param if company is Company.ITSELF else nn.Parameter(contiguous(param.detach()))
    if own is not param:
        if param.grad.dtype != param.dtype:
            own.grad_dtype = param.grad.dtype
        vars(own).update(vars(param) if company is Company.ATTRIBUTES else marks_of(param))
        own.grad = contiguous(param.grad)
    state: dict[str, Any] = optimizer.state[param]
    g = small.group_of[index]
    twin = make_twin(optimizer, optimizer.param_groups[g], [own], {own: state})
    if company in (Company.GROUP, Company.ALL_GROUPS):
        twin.param_groups = [
            {**hypers(group), "params": [own if p is param else without_gradient(p) for p in group["params"]]}
            for h, group in enumerate(optimizer.param_groups)
            if h == g or company is Company.ALL_GROUPS
        ]
    with bare(p for p in small.params if p is not own):
        step_plainly(twin)
    param.data.copy_(own.detach())
    state.update(twin.state[own])


@contextlib.contextmanager
def bare(params: Iterable[Tensor]) -> Iterator[None]:
    """Inside this context, parameters have no gradients: what an optimizer does to them beside its step shows."""
    before = [(param, param.grad) for param in params]
    for param, _ in before:
        param.grad = None
    try:
        yield
    finally:
        for param, grad in before:
            param.grad = grad


def contiguous(tensor: Tensor) -> Tensor:
    """Copy a tensor to contiguous memory, as gathering it does."""
    return tensor.clone(memory_format=torch.contiguous_format)


def without_gradient(param: nn.Parameter) -> nn.Parameter:
    """Copy a parameter that does not step."""
    made = nn.Parameter(param.detach().clone(), requires_grad=param.requires_grad)
    vars(made).update(marks_of(param))
    return made
