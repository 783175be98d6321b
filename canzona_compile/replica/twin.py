"""Twins: copies of an optimizer that hold other parameters, to run its own code on."""

from __future__ import annotations

import contextlib
import inspect
import math
import types
from collections import defaultdict
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from canzona_compile.compat.optimizer_class import class_as_written, plain_class, plain_step, required_arguments
from canzona_compile.compat.torch_private import pytree
from canzona_compile.errors import UnsupportedOptimizer
from canzona_compile.replica.homes import odd_state


@dataclass(frozen=True, slots=True)
class Loose:
    """Tensors without dims in which steps hold numbers, so that kernels are not compiled anew for every number.

    Attributes:
        scratch: the attributes with floats that steps write before they read them, and that depend on no gradient. A
            twin has its own, so those of the optimizer stay as they are.
        made: the hyperparameters that steps make tensors of: dtype and device.
    """

    scratch: set[str] = field(default_factory=set)
    made: dict[str, tuple[torch.dtype, torch.device]] = field(default_factory=dict)


LOOSE: MutableMapping[Optimizer, Loose] = WeakIdKeyDictionary()  # what rehearsals have seen


def loose_of(optimizer: Optimizer) -> Loose:
    """What a rehearsal has seen of an optimizer, or of the one that a twin is made of."""
    return LOOSE.get(optimizer, Loose())


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
    LOOSE[twin] = loose_of(optimizer)
    return twin


def rebound(attributes: Mapping[str, Any], optimizer: Optimizer, twin: Optimizer) -> dict[str, Any]:
    """Return attributes of an optimizer for a twin, whose methods step the twin where they stepped the optimizer."""
    own = {
        k: types.MethodType(v.__func__, twin) if isinstance(v, types.MethodType) and v.__self__ is optimizer else v
        for k, v in attributes.items()
    }
    return {**own, **blank_scratch(own, optimizer)}


def blank_scratch(attributes: Mapping[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """Return those of the attributes that hold scratch of an optimizer, with new tensors of NaN in its place."""

    def blank(value: Any) -> Any:
        return torch.full((), math.nan, dtype=value.dtype, device=value.device) if may_be_scratch(value) else value

    names = loose_of(optimizer).scratch & attributes.keys()
    return {name: pytree.tree_map(blank, attributes[name]) for name in names}


def may_be_scratch(value: Any) -> bool:
    """Tell whether a value is a float as a tensor without dims."""
    return isinstance(value, Tensor) and value.ndim == 0 and value.is_floating_point()


def scratch_of(optimizer: Optimizer) -> dict[int, Tensor]:
    """The scratch of an optimizer, by identity."""
    held = [vars(optimizer).get(name) for name in loose_of(optimizer).scratch]
    return {id(value): value for value in pytree.tree_leaves(held) if may_be_scratch(value)}


def make_tensors(optimizer: Optimizer) -> None:
    """Make tensors of hyperparameters as steps do, which would do it on twins alone."""
    for key, (dtype, device) in loose_of(optimizer).made.items():
        for group in optimizer.param_groups:
            if isinstance(group.get(key), int | float):
                group[key] = torch.full((), group[key], dtype=dtype, device=device)


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
