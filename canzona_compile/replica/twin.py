"""Twins: copies of an optimizer that hold other parameters, to run its own code on."""

from __future__ import annotations

import contextlib
import inspect
import types
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from canzona_compile.compat.optimizer_class import class_as_written, plain_class, plain_step, required_arguments
from canzona_compile.errors import UnsupportedOptimizer
from canzona_compile.replica.homes import odd_state


def check_step_signature(kind: type[Optimizer]) -> None:
    """Refuse wrappers of others, finalizers, and steps that cannot be called once without arguments."""
    if isinstance(inspect.getattr_static(kind, "param_groups", None), property):
        raise UnsupportedOptimizer(
            f"{kind.__name__} is a wrapper around another optimizer",
            hint="call wrap on the optimizer inside it",
        )
    if hasattr(kind, "__del__"):
        raise UnsupportedOptimizer(
            f"{kind.__name__} has a finalizer, __del__, which would also run for the copies that canzona_compile makes",
            hint="move __del__ to a method such as close(), or use weakref.finalize in an object that the optimizer "
            "holds",
        )
    if required := required_arguments(kind):
        raise UnsupportedOptimizer(
            f"{kind.__name__}.step requires {', '.join(required)}, because it evaluates the model several times per "
            "step",
            hint="use the optimizer unwrapped; optimizers like LBFGS cannot be split by parameter",
        )


def make_twin(
    optimizer: Optimizer,
    group: Mapping[str, Any],
    params: Sequence[Tensor],
    state: Mapping[Tensor, dict[str, Any]] | None = None,
) -> Optimizer:
    """Make an optimizer of the same class with the same attributes and one parameter group that holds `params`.

    `copy.copy` cannot do this, because `Optimizer.__getstate__` drops the attributes that subclasses add.

    The group has the keys that all groups have first, in one order, so that graphs, and plans by their fingerprints,
    do not depend on which of them the user gave and which are defaults.
    """
    twin = object.__new__(class_as_written(plain_class(optimizer)))
    own = {k: v for k, v in optimizer.__dict__.items() if k not in ("step", "canzona")}
    twin.__dict__.update(rebound(own, optimizer, twin))
    first = {key: group[key] for key in vars(optimizer).get("defaults", {}) if key in group}
    twin.param_groups = [{**first, **group, "params": list(params)}]
    twin.state = defaultdict(dict, {} if state is None else state)
    twin.state.update(odd_state(optimizer))
    return twin


def rebound(attributes: Mapping[str, Any], optimizer: Optimizer, twin: Optimizer) -> dict[str, Any]:
    """Return attributes of an optimizer for a twin, whose methods step the twin where they stepped the optimizer."""
    return {
        k: types.MethodType(v.__func__, twin) if isinstance(v, types.MethodType) and v.__self__ is optimizer else v
        for k, v in attributes.items()
    }


def step_plainly(twin: Optimizer, **arguments: Any) -> Any:
    """Run the twin's own eager step; return what it returns."""
    with torch.no_grad():
        return plain_step(type(twin))(twin, **arguments)


@contextlib.contextmanager
def as_written() -> Iterator[None]:
    """Inside this context, for trials of an optimizer's code, what users compiled in it runs as they wrote it.

    Compiled code remembers its calls: once a number differed between calls, it is no longer a constant of that code,
    and the next compile of it rounds differently. A rehearsal, which changes all numbers, must not do that to the real
    step.
    """
    with torch.compiler.set_stance("force_eager"):
        yield
