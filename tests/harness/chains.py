"""Chains of two and three optimizers, and the same optimizers stepped by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from torch.optim import AdamW, Muon, Optimizer

import canzona_compile
from canzona_compile import Chain, chain
from examples.optimizers.soap import SOAP
from tests.harness.optimizers import share_captures
from tests.harness.pairs import different, feed, parameters

SHAPES = ((6, 4), (4, 6), (5, 4), (4, 5), (7,), (3,))
Makers = Sequence[tuple[Callable[[list[Any]], Optimizer], slice]]

CHAINS: dict[str, Makers] = {
    "two": (
        (lambda p: Muon(p, lr=0.1), slice(0, 4)),
        (lambda p: AdamW(p, lr=0.1), slice(4, 6)),
    ),
    "three": (
        (lambda p: Muon(p, lr=0.1), slice(0, 2)),
        (lambda p: SOAP(p, lr=0.1, every=2), slice(2, 4)),
        (lambda p: AdamW([{"params": p[:1]}, {"params": p[1:], "weight_decay": 0.1}], lr=0.1), slice(4, 6)),
    ),
}


def members(makers: Makers, seed: int = 0) -> list[Optimizer]:
    params = parameters(SHAPES, seed=seed)
    return [make(params[place]) for make, place in makers]


def chained(name: str, wrapped: bool = False, seed: int = 0) -> Any:
    made: Any = chain(*members(CHAINS[name], seed))
    if wrapped:
        canzona_compile.wrap(made)
        share_captures(made)
    return made


class Hand:
    """The same optimizers, stepped by hand: what a chain has to equal."""

    def __init__(self, name: str) -> None:
        self.optimizers = members(CHAINS[name])

    def step(self, number: int) -> None:
        everything(self.optimizers, number)
        for optimizer in self.optimizers:
            optimizer.step()

    def different(self, other: Chain) -> list[str]:
        return [
            found
            for mine, yours in zip(self.optimizers, other.optimizers, strict=True)
            for found in different(mine, yours)
        ]


def everything(optimizers: Sequence[Optimizer], number: int) -> None:
    """Give all parameters of several optimizers the gradients of a step."""
    for i, optimizer in enumerate(optimizers):
        feed(optimizer, 100 * number + i)


def steps(made: Chain, numbers: Sequence[int], hand: Hand | None = None) -> None:
    for number in numbers:
        everything(made.optimizers, number)
        made.step()
        if hand is not None:
            hand.step(number)
            assert hand.different(made) == [], f"after step {number}"


both = pytest.mark.parametrize("name", list(CHAINS))
either = pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "wrapped"])
