"""Containers and proxies of frameworks, of which `wrap` wraps what is inside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from canzona_compile.api.chain import Chain, is_chain
from canzona_compile.replica.homes import held_in

# Packages, and methods of theirs that step each optimizer inside once and do nothing else to parameters.
KNOWN = {
    ("torchtitan", "OptimizersContainer.step"),
    ("accelerate", "AcceleratedOptimizer.step"),
    ("lightning_fabric", "_FabricOptimizer.step"),
    ("lightning", "_FabricOptimizer.step"),
}


def members_of(held: Sequence[Any]) -> tuple[Any, ...]:
    """The optimizers in what `inside` found, with each optimizer of a chain listed separately."""
    return tuple(own for one in held for own in (one.optimizers if is_chain(one) else (one,)))


def chain_of(held: Sequence[Any]) -> Chain | None:
    """The chain that is all that `inside` found; None if that is not one chain."""
    only, *others = held
    return only if is_chain(only) and not others else None


def inside(optimizer: Any) -> tuple[Any, ...]:
    """The optimizers and chains that a known container holds; of others, and of a chain, itself."""
    step = getattr(type(optimizer), "step", None)
    names = [getattr(step, name, "") for name in ("__module__", "__qualname__")]  # also where torch has wrapped it
    if is_chain(optimizer) or (names[0].split(".")[0], names[1]) not in KNOWN:
        return (optimizer,)
    found = {id(one): one for several in held_in(optimizer).values() for one in several}
    return tuple(found.values()) or (optimizer,)
