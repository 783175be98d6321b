"""Find out whether a step draws random numbers.

The bits of such a step depend on its rank and on all other code that draws from the same generator.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, fx


def draws(graph: fx.Graph) -> bool:
    """Tell whether an operator of a graph draws from a random generator."""
    return any(torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ()) for n in graph.nodes)


@dataclass(slots=True)
class Dice:
    """Whether random numbers were drawn inside `watched`; set when that context ends."""

    rolled: bool = False


@contextlib.contextmanager
def watched(device: torch.device) -> Iterator[Dice]:
    """Watch the generators of the CPU and of a device, and tell on exit whether numbers were drawn from them."""
    dice, before = Dice(), generators(device)
    yield dice
    dice.rolled = any(not torch.equal(a, b) for a, b in zip(before, generators(device), strict=True))


@contextlib.contextmanager
def undisturbed(device: torch.device) -> Iterator[Dice]:
    """Do the same as `watched` for a trial run: on exit the generators get their earlier states back."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), watched(device) as dice:
        yield dice


@contextlib.contextmanager
def seeded(device: torch.device) -> Iterator[Dice]:
    """Do the same as `undisturbed`, with the same seed every time."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        with watched(device) as dice:
            yield dice


def generators(device: torch.device) -> list[Tensor]:
    """Return the generator states of the CPU, on which code for a GPU may draw as well, and of a CUDA device."""
    found: list[Tensor] = [torch.get_rng_state()]
    if device.type == "cuda":
        found.append(torch.cuda.get_rng_state(device))
    return found
