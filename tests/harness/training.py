"""One training of a pair on all ranks: the plain optimizer on whole tensors, the wrapped one on fragments of them."""

from __future__ import annotations

import copy
import functools
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

from tests.harness.layouts import ALONE, Case
from tests.harness.optimizers import SHARED, Shared
from tests.harness.pairs import Pair
from tests.harness.ranks import run

Schedule = Callable[[Optimizer], Callable[[int], None]]  # given an optimizer: what to do to it before a step


@dataclass(frozen=True, eq=False, slots=True)
class Training:
    """An optimizer of parameters of these shapes, and how many steps it takes.

    Attributes:
        schedule: changes hyperparameters before every step.
        sizes: standard deviations of the first parameters and of the gradients.
        among: those that share captures, see `share_captures`.
    """

    make: Callable[[list[Any]], Optimizer]
    shapes: tuple[tuple[int, ...], ...]
    steps: int
    schedule: Schedule
    sizes: tuple[float, float] = (1.0, 1.0)
    among: Shared = field(default_factory=lambda: SHARED)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a rank found after the last step.

    Attributes:
        different: what has other bits than the plain run: "parameter 3", "state 0['momentum_buffer']".
        collectives: that the last step started, counted by the process groups, but for those by which ranks agree.
        report: of the wrapped optimizer.
    """

    different: list[str]
    collectives: int
    report: dict[str, Any]


def falling(first: float) -> Schedule:
    """A learning rate of all groups that is another one before each step."""

    def schedule(optimizer: Optimizer) -> Callable[[int], None]:
        def change(step: int) -> None:
            for group in optimizer.param_groups:
                group["lr"] = first / (1 + step)

        return change

    return schedule


def trained(
    training: Training, cases: Sequence[Case], dtype: torch.dtype, restored: bool = False, **options: Any
) -> tuple[Any, Outcome]:
    """The wrapped optimizer on this rank's fragments after a training beside the plain one, and what became of it.

    Args:
        restored: load its own state in mid-run.
        options: of `wrap`.
    """
    among = training.among
    pair = Pair(training.make, training.shapes, cases, dtype=dtype, sizes=training.sizes, among=among, **options)
    changes = [training.schedule(optimizer) for optimizer in pair.both]
    for step in range(training.steps):
        for change in changes:
            change(step)
        if restored and step == training.steps // 2:
            pair.wrapped.load_state_dict(copy.deepcopy(pair.wrapped.state_dict()))
        pair.feed()
        pair.take()
    canzona = pair.wrapped.canzona
    sessions = getattr(canzona, "sessions", None) or [canzona.session]  # of a chain
    agreed = {ranks for own in sessions for ranks in own.driver.numbers()}  # one all-reduce each, before any update
    return pair.wrapped, Outcome(pair.different(), pair.started - len(agreed), pair.report.to_dict())


def train(module: str, name: str, cases: Sequence[Case], dtype: torch.dtype, **options: Any) -> Outcome:
    """Take the training of this name among `TRAININGS` of a test file, on this rank."""
    return trained(importlib.import_module(module).TRAININGS[name], cases, dtype, **options)[1]


def ready(module: str, name: str, dtype: torch.dtype = torch.float32) -> functools.partial[Any]:
    """For `run(after=...)`: the training in one process, so that ranks need not capture what it did."""
    return functools.partial(train, module, name, [ALONE], dtype)


def on_ranks(
    module: str, name: str, cases: Sequence[Case], dtype: torch.dtype = torch.float32, **options: Any
) -> list[Outcome]:
    """The same on all ranks; what they share is captured once, before."""
    return run(cases[0].world, train, module, name, cases, dtype, after=ready(module, name, dtype), **options)


def check(outcomes: Sequence[Outcome], fallbacks: bool = False) -> dict[str, Any]:
    """The right bits everywhere, by graphs, with as many collectives as reported: the report."""
    assert [o.different for o in outcomes] == [[]] * len(outcomes)
    assert [bool(o.report["fallbacks"]) for o in outcomes] == [fallbacks] * len(outcomes)
    assert all(o.collectives == o.report["collectives_per_step"] for o in outcomes if not fallbacks)
    return outcomes[0].report
