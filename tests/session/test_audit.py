"""`audit=` finds what no rehearsal met, names the matrix, and disturbs nothing else."""

from __future__ import annotations

from typing import Any

import pytest

import canzona_compile
from canzona_compile.errors import CanzonaError
from tests.harness.pairs import feed, muon, parameters, params_of
from tests.harness.traps.grammar import toy

# Begins to look at all gradients on its fiftieth step.
CoupledLate = toy(
    "coupled-late",
    group='norm = sum(p.grad.norm() for p in group["params"] if p.grad is not None)',
    param='state["step"] = state.get("step", 0) + 1',
    times='norm if state["step"] > 49 else 1.0',
)()


def trained(steps: int) -> tuple[int, str]:
    """The number of good steps of a coupled optimizer, and the error after them."""
    optimizer = CoupledLate(parameters())
    canzona_compile.wrap(optimizer, audit=5)
    for step in range(steps):
        feed(optimizer, step)
        try:
            optimizer.step()
        except CanzonaError as error:
            return step, str(error)
    return steps, ""


def test_what_begins_after_the_rehearsal_is_found() -> None:
    good, says = trained(60)
    assert 40 <= good < 50, says
    assert "updates parameters together" in says


def test_a_wrong_bit_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer: Any = muon(parameters())
    canzona_compile.wrap(optimizer, audit=2)
    for step in range(2):
        feed(optimizer, step)
        optimizer.step()
    executor = type(optimizer.canzona.session.driver.last.executor)
    original = executor.run

    def off(own: Any) -> None:
        original(own)
        params_of(optimizer)[1].data[0, 0] += 1e-6

    monkeypatch.setattr(executor, "run", off)
    feed(optimizer, 2)
    with pytest.raises(CanzonaError, match=r"1 of 24 elements differ") as caught:
        optimizer.step()
    assert caught.value.at == "group0.param1"


def test_only_exact_bits_can_be_audited() -> None:
    with pytest.raises(CanzonaError, match="compares bits"):
        canzona_compile.wrap(muon(parameters()), audit=3, numerics="fast")
    with pytest.raises(CanzonaError, match="does not stagger"):
        canzona_compile.wrap(muon(parameters()), audit=3, stagger=True)
    with pytest.raises(CanzonaError, match="audit=0 is not a positive integer"):
        canzona_compile.wrap(muon(parameters()), audit=0)
