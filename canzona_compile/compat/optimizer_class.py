"""The class that a user wrote, and its step, without what wrapping and torch put around them."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from types import FunctionType
from typing import Any, cast

import torch
from torch.optim import Optimizer

from canzona_compile.errors import CanzonaError

# Decorators that torch puts around a step; what they do (hooks, profiling, grad mode) is the wrapper's
# business here, once per step and not once per parameter.
TORCH_DECORATORS = ("torch/optim/optimizer.py", "torch/utils/_contextlib.py")

MADE_BY_TORCH = "_TorchDynamoContext.__call__."  # how the names of functions begin that `torch.compile` returned


class HeldOptimizer:
    """An attribute that is an optimizer, and no cycle that keeps its state in memory until Python looks for garbage."""

    def __get__(self, holder: Any, kind: Any = None) -> Optimizer:
        if holder is None:
            raise AttributeError("optimizer")  # so that a dataclass finds no default
        found: Optimizer | None = vars(holder)["_optimizer"]()
        if found is None:
            raise CanzonaError(
                "a wrapped optimizer that this call needs was freed",
                hint="keep the optimizer while you use its .canzona, its chain or the others of its zero1 call",
            )
        return found

    def __set__(self, holder: Any, optimizer: Optimizer) -> None:
        vars(holder)["_optimizer"] = weakref.ref(optimizer)


def plain_class(optimizer: Optimizer) -> type[Optimizer]:
    """Return the class that the user wrote, whether or not the optimizer is wrapped."""
    kind = type(optimizer)
    return getattr(kind, "_canzona_plain_class", kind)


def compiled_methods(kind: type[Optimizer]) -> dict[str, Callable[..., Any]]:
    """The methods of a class that `torch.compile` compiles, by name, as they were written.

    They take the optimizer, so torch may compile them again for a copy of it, and that code may round otherwise.
    """
    found = {name: member for base in reversed(kind.__mro__) for name, member in vars(base).items()}
    return {
        name: member._torchdynamo_orig_callable  # type: ignore[attr-defined]
        for name, member in sorted({**found, "step": plain_step(kind)}.items())
        if isinstance(member, FunctionType) and member.__code__.co_qualname.startswith(MADE_BY_TORCH)
    }


_as_written: dict[Any, Any] = {}  # by class


def class_as_written(kind: type[Optimizer]) -> type[Optimizer]:
    """A class for copies of an optimizer, whose methods run as written; its own class if it compiles none."""
    if kind not in _as_written:
        methods, metaclass = compiled_methods(kind), cast(Any, type(kind))
        if "step" in methods:  # what was around the compiled one
            methods["step"] = torch.no_grad()(methods["step"])
        named = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
        _as_written[kind] = metaclass(kind.__name__, (kind,), {**named, **methods}) if methods else kind
    found: type[Optimizer] = _as_written[kind]
    return found


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
