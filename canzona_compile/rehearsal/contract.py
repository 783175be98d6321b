"""What a refusal says of the contract: the line that is broken, and what to write instead."""

from __future__ import annotations

import inspect
from typing import Any

from torch.optim import Optimizer

from canzona_compile.compat.optimizer_class import plain_class
from canzona_compile.replica.homes import hypers

TOGETHER = (
    "if it is elementwise, leave it out of `wrap`: in a chain, wrap only the matrix optimizer; or move the coupling "
    "(global norms, shared statistics) out of step(), for example to clip_grad_norm_"
)


def broken(line: int | str) -> str:
    """Name a line of the contract, which docs/optimizers.md has."""
    return f"this breaks line {line} of the contract"


def object_per_matrix(optimizer: Optimizer) -> str:
    """Say what to write so that each matrix has an optimizer object of its own, with the arguments that can be found.

    They are found by name among the values of the first group. The user knows what else the constructor needs.
    """
    kind = plain_class(optimizer)
    groups = optimizer.param_groups
    values = {**vars(optimizer).get("defaults", {}), **(hypers(groups[0]) if groups else {})}
    arguments = list(inspect.signature(kind.__init__).parameters.values())[2:]
    given = [
        f"{a.name}={values[a.name]!r}"
        for a in arguments
        if a.name in values and is_written(values[a.name], None if a.name == "lr" else a.default)
    ]
    made = ", ".join(["params", *given])
    return (
        "if each matrix is updated by itself, give each an optimizer object of its own: "
        f"wrap(optimizer, one_per_matrix=lambda params: {kind.__name__}({made}))"
    )


def is_written(value: Any, default: Any) -> bool:
    """Tell whether a value can be written as it is printed, and has to be."""
    if isinstance(value, list | tuple):
        return all(is_written(inside, None) or inside is None for inside in value) and value != default
    return isinstance(value, bool | int | float | str) and (type(value) is not type(default) or value != default)
