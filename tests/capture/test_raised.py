"""Errors that only a capture has are noted, whoever catches them, and void it."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor

from canzona_compile.errors import UnsupportedOptimizer
from canzona_compile.replica.raised import NoCollectives, Note, NotingFakeMode, NotingFunctions, Swallowed
from tests.harness.pairs import Pair
from tests.harness.traps import NAMED
from tests.harness.traps.grammar import toy


def read_number(x: Tensor) -> Any:
    return x.sum().item()


def read_array(x: Tensor) -> Any:
    return x.numpy()


def branch(x: Tensor) -> Any:
    return 1 if x.sum() > 0 else 2


@pytest.mark.parametrize("reads", [read_number, read_array, branch], ids=["number", "array", "branch"])
def test_what_fake_tensors_raise_is_noted(reads: Any) -> None:
    note = Note()
    with pytest.raises(Swallowed, match="catches an error that only its capture has"):  # noqa: SIM117
        with note.read(), NotingFunctions(note), NotingFakeMode(note), contextlib.suppress(Exception):
            reads(torch.ones(3, 3))


def test_a_fake_mode_notes_by_itself_what_its_operators_raise() -> None:
    note = Note()
    with NotingFakeMode(note):
        x = torch.ones(3, 3)
    with contextlib.suppress(Exception):
        x.sum().item()
    assert type(note.error).__name__ == "DataDependentOutputException"


def test_without_an_error_nothing_is_raised() -> None:
    note = Note()
    with note.read(), NotingFunctions(note), NotingFakeMode(note):
        torch.ones(3, 3) @ torch.ones(3, 3)
    assert note.error is None


def test_an_error_that_is_not_caught_stays_the_error() -> None:
    note = Note()

    def trial() -> None:
        with note.read(), NotingFunctions(note), NotingFakeMode(note):
            with contextlib.suppress(Exception):
                torch.ones(3).numpy()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        trial()


def test_a_refusal_is_raised_whatever_the_step_makes_of_it() -> None:
    note = Note()

    def trial() -> None:
        with note.read():
            note.add(ValueError("first"))
            note.add(UnsupportedOptimizer("no"))
            raise KeyError

    with pytest.raises(UnsupportedOptimizer, match="no"):
        trial()


class Communicating:
    """An operator that communicates, as modes see it."""

    namespace = "c10d"


@pytest.mark.parametrize("raises_another", [False, True])
def test_code_that_catches_a_forbidden_collective_is_refused_where_the_mode_ends(raises_another: bool) -> None:
    def trial() -> None:
        with NoCollectives() as mode:
            with contextlib.suppress(Exception):
                mode.check(Communicating)
            if raises_another:
                raise KeyError

    with pytest.raises(UnsupportedOptimizer, match="communicates by itself"):
        trial()


@pytest.mark.parametrize("trap", ["item-or-one", "array-or-one"])
def test_a_step_that_catches_such_errors_is_interpreted_and_says_why(trap: str) -> None:
    pair = Pair(NAMED[trap].make, captures_anew=True)
    why = {row.why for row in pair.wrapped.canzona.explain().parameters}
    assert all("catches an error that only its capture has" in reason for reason in why), why


# Catches an error that no operator raises.
CatchesItsOwn = toy("catches-its-own")("""
    with contextlib.suppress(KeyError):
        group["lr"] = group["schedule"][0]
    param.sub_(cube(grad) * group["lr"])
""")


def test_errors_of_the_optimizers_own_void_nothing() -> None:
    pair = Pair(CatchesItsOwn, captures_anew=True)
    assert {row.how for row in pair.wrapped.canzona.explain().parameters} == {"compiled"}
