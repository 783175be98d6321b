"""Does a step draw random numbers? Then its bits depend on what else draws from the generator, and on which rank."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, fx


def draws(graph: fx.Graph) -> bool:
    """Is there an operator in it that takes numbers from a generator?"""
    return any(torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ()) for n in graph.nodes)


@dataclass(slots=True)
class Dice:
    """Were numbers drawn while `watched`?"""

    rolled: bool = False


@contextlib.contextmanager
def watched(device: torch.device) -> Iterator[Dice]:
    dice, before = Dice(), generators(device)
    yield dice
    dice.rolled = any(not torch.equal(a, b) for a, b in zip(before, generators(device), strict=True))


@contextlib.contextmanager
def undisturbed(device: torch.device) -> Iterator[Dice]:
    """Trial runs: as `watched`, and the generators are put back."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), watched(device) as dice:
        yield dice


def generators(device: torch.device) -> list[Tensor]:
    """Their states: of the CPU, on which code for a GPU may draw as well, and of the device."""
    found: list[Tensor] = [torch.get_rng_state()]
    if device.type == "cuda":
        found.append(torch.cuda.get_rng_state(device))
    return found
