"""A trap: a small optimizer, or what a user does to one between steps, that tempts a wrapper into other results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

Params = list[Any]
Expected = Literal["equal", "refused", "either"]
Feed = Callable[[], Tensor]
Shape = tuple[int, ...]

PLAIN, FSDP, DDP = "plain", "fsdp", "ddp"  # names of layouts in tests/harness/layouts.py


@dataclass(frozen=True, slots=True, eq=False)
class Trap:
    """A trap, and what is right.

    A run makes parameters, then calls `prepare` and `make`. Every step sets gradients, then calls `edit` and `call`.

    Attributes:
        name: in kebab-case, like no other.
        family: a row of the table in the design.
        make: the optimizer of some parameters. It resets what lies outside, as two runs share a process.
        expected: "equal", "refused", or "either" where both are fine.
        says: words that the message of a refusal holds, in whatever case.
        steps: how many there are.
        edit: what the user does before a step, when gradients are there.
        prepare: what the user does to the parameters before they are given to the optimizer.
        grads: the gradient of the parameter at a place, made of a random one; None is a missing one.
        call: how the user calls `step`. A call of `feed` sets gradients anew, larger ones, and returns a loss.
        seen: what else the user sees after a step.
        shapes: of the parameters.
        start: the first value of the parameter at a place, made of a random one.
        compares_grads: whether gradients after the step count.
        accumulates: whether gradients are added to those that the last step left.
        layouts: where it runs.
    """

    name: str
    family: str
    make: Callable[[Params], Any]
    expected: Expected
    says: tuple[str, ...] = ()
    steps: int = 4
    edit: Callable[[Any, Params, int], None] = lambda optimizer, params, step: None
    prepare: Callable[[Params], None] = lambda params: None
    grads: Callable[[Tensor, int, int], Tensor | None] = lambda grad, place, step: grad
    call: Callable[[Any, Feed, int], Any] = lambda optimizer, feed, step: optimizer.step()
    seen: Callable[[Any], Any] = lambda optimizer: None
    shapes: tuple[Shape, ...] = ((5, 3), (3, 5), (5, 3), (3, 5))
    start: Callable[[Tensor, int], Tensor] = lambda value, place: value
    compares_grads: bool = False
    accumulates: bool = False
    layouts: tuple[str, ...] = (PLAIN, FSDP, DDP)
