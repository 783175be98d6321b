"""Optimizers of packages as they are: wrapped, they give the plain one's bits, or are refused by a stated message."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

import canzona_compile
from canzona_compile.errors import UnsupportedOptimizer
from tests.harness.layouts import Case, Laid
from tests.harness.pairs import params_of
from tests.harness.training import Plain, Training, equal, plain_run

EQUAL = "equal"
DRAWN = "the numbers that each matrix draws are those of any number of ranks"
CASE = Case("fsdp", (2,))
SHAPES = ((31, 17), (7, 12), (31, 17))


@dataclass(frozen=True, eq=False, slots=True)
class Published:
    """An optimizer of a package.

    Attributes:
        name: of its class.
        hypers: its arguments.
        expected: `EQUAL`, `DRAWN`, or a part of the message that refuses it.
        shapes: of its parameters.
    """

    name: str
    hypers: Mapping[str, Any]
    expected: str = EQUAL
    shapes: tuple[tuple[int, ...], ...] = SHAPES

    def __str__(self) -> str:
        return self.name


def imported(name: str) -> Any:
    """Import a package, whatever it warns of; without it, skip the test."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name, exc_type=ImportError)


def as_it_is(_optimizer: Optimizer) -> Callable[[int], None]:
    """Change no hyperparameters. Some packages count steps in them."""
    return lambda _step: None


def verdict(one: Published, module: Any, steps: int = 6) -> str:
    """Train a published optimizer on this rank, plain and wrapped; if it draws, wrapped without other ranks and with.

    Parameters are compared after the last step. State is not: packages show it in forms of their own.

    Returns:
        `EQUAL`, what differs, or the message that refuses it.
    """

    def make(params: list[Any]) -> Optimizer:
        optimizer: Any = getattr(module, one.name)(params, **one.hypers)
        if hasattr(optimizer, "train"):
            optimizer.train()  # those without a schedule step in this mode only
        made: Optimizer = optimizer
        return made

    warnings.simplefilter("ignore")
    plain = plain_run(Training(make, one.shapes, steps, as_it_is), torch.float32)
    laid = Laid(plain.first, CASE)
    optimizer: Any = canzona_compile.wrap(make(laid.params), strategy="owner")
    try:
        for values in plain.grads:
            for i, param in enumerate(laid.params):
                param.grad = laid.like_param(values[i], i)
            optimizer.step()
    except UnsupportedOptimizer as error:
        return error.problem
    other = alone(make, plain) if one.expected == DRAWN else plain.optimizer
    pairs = zip(params_of(optimizer), params_of(other), strict=True)
    wrong = [i for i, (mine, whole) in enumerate(pairs) if not equal(mine.detach(), whole.detach(), laid, i)]
    return f"parameters {wrong} differ" if wrong else DRAWN if one.expected == DRAWN else EQUAL


def alone(make: Callable[[list[Any]], Optimizer], plain: Plain) -> Optimizer:
    """Train a wrapped optimizer of whole parameters, which no other rank shares."""
    optimizer = canzona_compile.wrap(make([torch.nn.Parameter(value.clone()) for value in plain.first]))
    for values in plain.grads:
        for param, value in zip(params_of(optimizer), values, strict=True):
            param.grad = value.clone()
        optimizer.step()
    return optimizer


def check(found: list[str], one: Published) -> None:
    """Every rank found what is expected."""
    assert [said for said in found if one.expected not in said] == []
