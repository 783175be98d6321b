"""Steps that do not end, or end the process, for gradients that trials give and trainings may never have."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

import canzona_compile
from canzona_compile import UnsupportedOptimizer
from canzona_compile.rehearsal.endless import Endless, Lines
from tests.harness.pairs import Pair, feed, parameters, params_of
from tests.harness.ranks import run
from tests.harness.traps.grammar import toy

# Halves a matrix until it is small, which NaN never is.
Halves = toy("halves")("""
    small, count = grad.clone(), 0
    while not float(small.norm()) < 1e-3:
        small, count = small / 2, count + 1
    param.sub_(cube(grad) * 0.01 * count)
""")


# The same with a number, so that no operator is called meanwhile.
HalvesNumber = toy("halves-number")("""
    small, count = float(grad.norm()), 0
    while not small < 1e-3:
        small, count = small / 2, count + 1
    param.sub_(cube(grad) * 0.01 * count)
""")


# Doubles a matrix until it is large, which zeros never are.
Doubles = toy("doubles")("""
    large, count = grad.clone(), 0
    while float(large.norm()) < 1e3:
        large, count = large * 2, count + 1
    param.sub_(cube(grad) * 0.01 * count)
""")


@pytest.mark.parametrize("kind", [Halves, HalvesNumber, Doubles])
def test_loops_that_odd_gradients_do_not_end(kind: Any) -> None:
    Pair(kind).steps(3)


# Does not end for any gradient, and swallows errors.
Forever = toy("forever")("""
    count = 0
    while count >= 0:
        try:
            count += 1
        except Exception:
            count = 0
""")


def test_a_step_that_never_ends_is_refused() -> None:
    wrapped: Any = canzona_compile.wrap(Forever(parameters()))
    before = [p.detach().clone() for p in params_of(wrapped)]
    feed(wrapped, 0)
    with pytest.raises(UnsupportedOptimizer, match=r"Forever\.step does not end"):
        wrapped.step()
    assert all(map(torch.equal, before, params_of(wrapped)))
    assert sys.gettrace() is None


def test_lines_are_counted_and_a_debugger_stays() -> None:
    lines = Lines()
    with lines.bounded(odd=False):
        count = sum(1 for _ in range(10))
    assert lines.longest < 100
    with pytest.raises(Endless), lines.bounded(odd=True):
        endless()
    assert sys.gettrace() is None

    def tracer(*_: Any) -> None:
        return None

    sys.settrace(tracer)
    try:
        with lines.bounded(odd=True):
            assert sys.gettrace() is tracer
    finally:
        sys.settrace(None)
    assert count == 10


def endless() -> None:
    number = 0
    while True:
        number += 1


# Divides by an eigenvalue of a matrix that LAPACK does not know to be symmetric.
Eigenvalues = toy("eigenvalues")("""
    largest = torch.linalg.eigvals(grad @ grad.T).real.amax()
    param.sub_(cube(grad) * 0.01 / (1 + largest))
""")


def take_eigenvalues() -> None:
    Pair(Eigenvalues).steps(3)


def test_general_eigenvalues_do_not_end_the_process() -> None:
    """Of NaN, LAPACK's end it; a rehearsal gives it NaN, and a process of its own shows whether it lives."""
    assert run(1, take_eigenvalues, fresh=True, group=False) == [None]
