"""The class that a user wrote, and its step, without what wrapping and torch put around them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

# Decorators that torch puts around a step; what they do (hooks, profiling, grad mode) is the wrapper's
# business here, once per step and not once per parameter.
TORCH_DECORATORS = ("torch/optim/optimizer.py", "torch/utils/_contextlib.py")


def plain_class(optimizer: Optimizer) -> type[Optimizer]:
    """Return the class that the user wrote, whether or not the optimizer is wrapped."""
    kind = type(optimizer)
    return getattr(kind, "_canzona_plain_class", kind)


def plain_step(kind: type[Optimizer]) -> Callable[..., Any]:
    """Return the step function of an optimizer class without the decorators that torch added."""
    step: Callable[..., Any] = kind.step
    while hasattr(step, "__wrapped__"):
        source = inspect.getsourcefile(step.__code__) or ""
        if not source.replace("\\", "/").endswith(TORCH_DECORATORS):
            break
        step = step.__wrapped__
    return step


def required_arguments(kind: type[Optimizer]) -> list[str]:
    """The arguments without which a class's step cannot be called, such as the closure of LBFGS."""
    return [
        name
        for name, parameter in list(inspect.signature(plain_step(kind)).parameters.items())[1:]
        if parameter.default is inspect.Parameter.empty
        and parameter.kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    ]
