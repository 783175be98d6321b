"""The names of an optimizer's parameters."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.optim import Optimizer


def named_params(optimizer: Optimizer, names: Sequence[Sequence[str]] = ()) -> list[tuple[str, int, Tensor]]:
    """Name every parameter of an optimizer, with unique names.

    Args:
        optimizer: the optimizer.
        names: the names of the parameters in each parameter group that has no `param_names`.

    Returns:
        For each parameter its name, the index of its parameter group, and the parameter.
    """
    found = []
    for g, group in enumerate(optimizer.param_groups):
        known = group.get("param_names") or (names[g] if g < len(names) else ())
        for i, param in enumerate(group["params"]):
            found.append((printable(str(known[i])) if i < len(known) else f"group{g}.param{i}", g, param))
    counts: dict[str, int] = {}
    unique = []
    for name, g, p in found:
        counts[name] = counts.get(name, 0) + 1
        unique.append((name if counts[name] == 1 else f"{name}#{counts[name]}", g, p))
    return unique


def printable(name: str) -> str:
    """Escape what a terminal would obey."""
    return name if name.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in name)
