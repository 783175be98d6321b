"""What zero1 saves others load, and the other way round, with the bits of an unbroken run."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tests.data_parallel.checkpoints import alone, by_hand, load, save
from tests.harness.marks import only
from tests.harness.ranks import run

Place = tuple[str, int]  # a layout, and the number of ranks

ZERO1, PLAIN = ("zero1", 4), ("plain", 1)
OTHERS = [("zero1", 3), ("fsdp", 2), PLAIN, ("replicate", 2), ("zero1 tp", 4), ("zero1 replicas", 4), ("tp", 2)]
BESIDE_TP = [(("zero1 tp", 4), other) for other in (PLAIN, ("fsdp", 2), ("tp", 2), ("replicate tp", 4))]
ROUTES = [(ZERO1, other) for other in OTHERS] + BESIDE_TP
BOTH_WAYS = [*ROUTES, *[(other, one) for one, other in ROUTES]]
FAST = [((PLAIN, ZERO1), "muon and adamw"), ((("zero1 tp", 4), PLAIN), "muon and adamw")]


@pytest.mark.parametrize(("route", "make"), only(FAST, BOTH_WAYS, ["muon and adamw", "soap"]))
def test_every_route(route: tuple[Place, Place], make: str, tmp_path: Path) -> None:
    (layout, world), (other, others) = route
    after = partial(alone, make)
    assert run(world, save, layout, make, tmp_path, group=layout != "plain", after=after) == [[]] * world
    assert run(others, load, other, make, tmp_path, group=other != "plain", after=after) == [[]] * others


FUSED = [("zero1", 3), ("wrap", 1), ("fsdp", 2), ("tp", 2), ("replicate", 2), ("zero1 tp", 4), ("zero1 replicas", 4)]
FUSED_ROUTES = [(ZERO1, other) for other in FUSED] + [(other, ZERO1) for other in FUSED[1:]]
FUSED_TP = [(("zero1 tp", 4), other) for other in (("fsdp", 2), ("replicate tp", 4))]


@pytest.mark.parametrize(("route", "make"), only([], [*FUSED_ROUTES, *FUSED_TP], ["muon", "soap"]))
def test_every_route_of_fused_weights(route: tuple[Place, Place], make: str, tmp_path: Path) -> None:
    (layout, world), (other, others) = route
    after = partial(alone, make, "interleaved")
    parts = (make, tmp_path, "interleaved")
    assert run(world, save, layout, *parts, group=layout != "wrap", after=after) == [[]] * world
    assert run(others, load, other, *parts, group=other != "wrap", after=after) == [[]] * others


@pytest.mark.full
@pytest.mark.parametrize("make", ["muon and adamw", "soap"])
def test_a_state_dict_put_back_by_hand(make: str) -> None:
    assert run(2, by_hand, make, after=partial(alone, make)) == [[], []]
