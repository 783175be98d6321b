"""The names of an optimizer's parameters."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.optim import Optimizer

from canzona_compile.ir.canonical_names import DDP, canonical_name, canonical_names


def named_params(
    optimizer: Optimizer, names: Sequence[Sequence[str]] = (), prefix: str = ""
) -> list[tuple[str, int, Tensor]]:
    """Name every parameter of an optimizer, with unique names that are the same whatever wraps the model's modules.

    Args:
        optimizer: the optimizer.
        names: the canonical names that the model gives to the parameters of each group, for groups without
            `param_names`; empty if the model is not known.
        prefix: begins the names of parameters that nobody named. It tells the optimizers of a chain apart.

    Returns:
        For each parameter its name, the index of its parameter group, and the parameter.
    """
    own = [list(map(str, group.get("param_names") or ())) for group in optimizer.param_groups]
    if not names:  # else the model tells whether DDP gave them a prefix
        plain = iter(canonical_names(name for group_names in own for name in group_names))
        own = [[next(plain) for _ in group_names] for group_names in own]
    found = []
    for g, group in enumerate(optimizer.param_groups):
        given = names[g] if g < len(names) else ()
        for i, param in enumerate(group["params"]):
            name = given[i] if i < len(given) else ""
            if i < len(own[g]) and (said := canonical_name(own[g][i])) != DDP + name:
                name = said
            found.append((printable(name) if name else f"{prefix}group{g}.param{i}", g, param))
    counts: dict[str, int] = {}
    unique = []
    for name, g, p in found:
        counts[name] = counts.get(name, 0) + 1
        unique.append((name if counts[name] == 1 else f"{name}#{counts[name]}", g, p))
    return unique


def printable(name: str) -> str:
    """Escape what a terminal would obey."""
    return name if name.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in name)
