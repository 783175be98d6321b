"""Optimizers and edits that tempt a wrapper into other results: each is followed bit for bit, or refused by name."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import canzona_compile
from tests.harness import verdicts
from tests.harness.layouts import ALONE, Case
from tests.harness.marks import first
from tests.harness.trap_runs import (
    CASES,
    DIFFERENT,
    EQUAL,
    REFUSED,
    Verdict,
    frozen_mistakes,
    mistakes,
    verdict,
    verdict_on_ranks,
)
from tests.harness.traps import FAMILIES, NAMED, TRAPS
from tests.harness.traps.trap import DDP, FSDP, PLAIN, Trap


def of_family(family: str) -> list[Trap]:
    return [trap for trap in TRAPS if trap.family == family]


def first_of_families() -> list[Any]:
    """The names of all traps of one process.

    `make test` takes the first two of each family, and the third one where something else becomes of it.
    """
    frozen, found = verdicts.TRAPS.lines(), []
    for family in FAMILIES:
        names = [trap.name for trap in of_family(family) if PLAIN in trap.layouts]
        ends = [frozen.get(f"{name} {PLAIN}") for name in names]
        found += first(names, 2 if ends[2:3] == [] or ends[2] in ends[:2] else 3)
    return found


@pytest.mark.parametrize("trap", first_of_families())
def test_in_one_process(trap: str) -> None:
    assert frozen_mistakes(NAMED[trap], verdict(NAMED[trap], ALONE), PLAIN) == []


def wrong_on_ranks(traps: Sequence[Trap], layout: str) -> list[str]:
    """What is wrong with these traps on two ranks. Of five rows FSDP2 leaves them three and two, DDP all."""
    found = []
    for trap in traps:
        if layout in trap.layouts:
            found += frozen_mistakes(trap, verdict_on_ranks(trap.name, CASES[layout]), layout)
    return found


@pytest.mark.parametrize(("layout", "families"), [(FSDP, FAMILIES[::4]), (DDP, FAMILIES[2::4])], ids=[FSDP, DDP])
def test_some_families_on_two_ranks(layout: str, families: Sequence[str]) -> None:
    assert wrong_on_ranks([of_family(family)[0] for family in families], layout) == []


@pytest.mark.full
@pytest.mark.parametrize("layout", [FSDP, DDP])
@pytest.mark.parametrize("family", FAMILIES)
def test_on_two_ranks(family: str, layout: str) -> None:
    assert wrong_on_ranks(of_family(family), layout) == []


@pytest.mark.parametrize(
    ("found", "wrong"),
    [
        (Verdict("equal"), 1),
        (Verdict(REFUSED, "the step reads P.LR_MUL"), 0),
        (Verdict(REFUSED, "no"), 1),
        (Verdict(DIFFERENT, "step 1: parameter 0"), 1),
    ],
    ids=str,
)
def test_verdicts_are_judged(found: Verdict, wrong: int) -> None:
    """Otherwise the tests above would show little."""
    trap = Trap("a-trap", "harmless", TRAPS[0].make, "refused", ("lr_mul",))
    assert len(mistakes(trap, found)) == wrong


def test_without_a_wrapper_nothing_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two plain runs of a trap are equal: no trap leaves anything behind, and no comparison finds what is not there."""
    monkeypatch.setattr(canzona_compile, "wrap", lambda optimizer, replicate=None: optimizer)
    found = {trap.name: verdict(trap, ALONE) for trap in TRAPS}
    assert {name: str(v) for name, v in found.items() if v != Verdict(EQUAL)} == {}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda optimizer: optimizer.param_groups[0].update(lr=0.2), "parameter 0"),
        (lambda optimizer: optimizer.param_groups[0].update(extra=1), "groups"),
        (lambda optimizer: optimizer.state.update(extra=1), "state"),
    ],
    ids=["lr", "groups", "state"],
)
def test_what_a_wrapper_changes_is_found(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], None], says: str
) -> None:
    def wrap(optimizer: Any, replicate: Any = None) -> Any:
        change(optimizer)
        return optimizer

    monkeypatch.setattr(canzona_compile, "wrap", wrap)
    found = verdict(NAMED["nested-functions"], ALONE)
    assert (found.kind, says in found.says) == (DIFFERENT, True), found


def test_the_source_of_a_trap_is_found() -> None:
    """Dynamo and error messages look for it, and what lies outside is searched in the module."""
    optimizer = NAMED["count-in-global"].make([torch.nn.Parameter(torch.ones(2, 3))])
    kind = type(optimizer)
    assert kind.__name__ == "CountInGlobal"
    assert inspect.getsource(kind).startswith("class CountInGlobal(PerParameter):")
    assert "ticks += 1" in inspect.getsource(kind.step)
    optimizer.step()
    assert vars(sys.modules[kind.__module__])["ticks"] == 1


def test_cases_are_of_two_ranks() -> None:
    assert {name: case.world for name, case in CASES.items()} == {PLAIN: 1, FSDP: 2, DDP: 2}
    assert all(isinstance(case, Case) for case in CASES.values())
