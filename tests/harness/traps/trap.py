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


def prepare_nothing(params: Params) -> None:
    """Leave parameters as they are."""


def edit_nothing(optimizer: Any, params: Params, step: int) -> None:
    """Change nothing before a step."""


def as_drawn(grad: Tensor, place: int, step: int) -> Tensor | None:
    """Take the random gradient as it is."""
    return grad


def as_given(value: Tensor, place: int) -> Tensor:
    """Take the random parameter as it is."""
    return value


def step_once(optimizer: Any, feed: Feed, step: int) -> Any:
    """Call `step` as most training loops do."""
    return optimizer.step()


def see_nothing(optimizer: Any) -> Any:
    """Look at nothing beside parameters, state, groups and the return value."""
    return None


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
    edit: Callable[[Any, Params, int], None] = edit_nothing
    prepare: Callable[[Params], None] = prepare_nothing
    grads: Callable[[Tensor, int, int], Tensor | None] = as_drawn
    call: Callable[[Any, Feed, int], Any] = step_once
    seen: Callable[[Any], Any] = see_nothing
    shapes: tuple[Shape, ...] = ((5, 3), (3, 5), (5, 3), (3, 5))
    start: Callable[[Tensor, int], Tensor] = as_given
    compares_grads: bool = False
    accumulates: bool = False
    layouts: tuple[str, ...] = (PLAIN, FSDP, DDP)


# -- what several traps do -------------------------------------------------------------------------


def halves(params: Params, *first: dict[str, Any]) -> list[dict[str, Any]]:
    """Two groups of equally many parameters, with hyperparameters for each."""
    middle = len(params) // 2
    groups = [{"params": params[:middle]}, {"params": params[middle:]}]
    return [{**group, **hypers} for group, hypers in zip(groups, first or ({}, {}), strict=True)]


def set_group(name: str, value: Any, at: int, group: int = 0) -> Callable[[Any, Params, int], None]:
    """An edit: a hyperparameter of a group gets a value before a step."""

    def edit(optimizer: Any, params: Params, step: int) -> None:
        if step == at:
            optimizer.param_groups[group][name] = value

    return edit


def set_attribute(name: str, value: Any, at: int = 2) -> Callable[[Any, Params, int], None]:
    """An edit: an attribute of the optimizer gets a value before a step."""

    def edit(optimizer: Any, params: Params, step: int) -> None:
        if step == at:
            setattr(optimizer, name, value)

    return edit
