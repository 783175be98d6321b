"""Optimizers of packages as they are: wrapped, they give the plain one's bits, or are refused by a stated message."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

import canzona_compile
from canzona_compile.errors import CanzonaError, UnsupportedOptimizer
from tests.harness.layouts import Case
from tests.harness.pairs import Pair, different, parameters, params_of
from tests.harness.verdicts import SURVEY, reached, ways_of

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
        expected: `EQUAL`, `DRAWN`, or a part of the message that refuses it; nothing if only the golden line counts.
        shapes: of its parameters.
        by_line: whether it is wrapped as the line says that its refusal prints.
        build: makes it of its class and parameters, if it does not take them as torch's optimizers do.
    """

    name: str
    hypers: Mapping[str, Any]
    expected: str = EQUAL
    shapes: tuple[tuple[int, ...], ...] = SHAPES
    by_line: bool = False
    build: Callable[..., Any] | None = None

    def __str__(self) -> str:
        return self.name


def imported(name: str) -> Any:
    """Import a package, whatever it warns of; without it, skip the test."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name, exc_type=ImportError)


@dataclass(frozen=True, slots=True)
class Found:
    """What became of a published optimizer.

    Attributes:
        said: `EQUAL`, `DRAWN`, what differs, or the message that refuses it.
        reached: the line of tests/golden/verdicts/ that it gives.
    """

    said: str
    reached: str


def verdict(one: Published, module: Any, steps: int = 6, case: Case = CASE) -> Found:
    """Train a published optimizer on this rank, plain and wrapped; if it draws, wrapped without other ranks and with.

    Parameters are compared after the last step. State is not: packages show it in forms of their own.
    """

    def make(params: list[Any]) -> Optimizer:
        torch.manual_seed(0)
        kind = getattr(module, one.name)
        optimizer: Any = kind(params, **one.hypers) if one.build is None else one.build(kind, params, **one.hypers)
        if hasattr(optimizer, "train"):
            optimizer.train()  # those without a schedule step in this mode only
        made: Optimizer = optimizer
        return made

    def train(pair: Pair, optimizer: Any) -> Any:
        torch.manual_seed(0)
        for pair.number in range(steps):
            pair.feed()
            optimizer.step()
        return optimizer

    warnings.simplefilter("ignore")
    options: dict[str, Any] = {"captures_anew": True}
    try:
        if one.by_line:
            options["one_per_matrix"] = maker_in_refusal(make(parameters(one.shapes)), one.name, module)
        pair = Pair(make, one.shapes, case, strategy="owner", **options)
        if one.expected in (EQUAL, DRAWN):  # what is refused may communicate, and hang by itself
            train(pair, pair.plain)
        train(pair, pair.wrapped)
    except CanzonaError as error:
        return Found(error.problem, reached("refused", error=type(error).__name__))
    plain = pair.plain
    if one.expected == DRAWN:  # beside a wrapped one of whole parameters, which no other rank shares
        alone = Pair(make, one.shapes, **options)
        plain = train(alone, alone.wrapped)
    wrong, ways = different(plain, pair.wrapped, pair.laid, states=False), ways_of(pair.wrapped)
    if wrong:
        return Found(f"{wrong} differ", reached("different", ways))
    return Found(DRAWN, reached("drawn", ways)) if one.expected == DRAWN else Found(EQUAL, reached("equal", ways))


def maker_in_refusal(optimizer: Any, name: str, module: Any) -> Any:
    """The function in the line that the refusal of an optimizer tells users to write."""
    rows = params_of(canzona_compile.wrap(optimizer))
    for param in rows:
        param.grad = torch.zeros_like(param)
    with pytest.raises(UnsupportedOptimizer) as caught:
        optimizer.step()
    line = re.search(r"wrap\(optimizer, one_per_matrix=(.*\))\)", str(caught.value))
    assert line is not None, caught.value
    return eval(line[1], {name: getattr(module, name)})


def check(found: list[Found], one: Published, of: str) -> None:
    """Every rank found what is expected, and what was found before.

    Args:
        of: the optimizer and the layout, as tests/golden/verdicts/survey.txt calls them.
    """
    assert [own.said for own in found if one.expected not in own.said] == []
    assert [mistake for own in found for mistake in SURVEY.mistakes(of, own.reached)] == []
