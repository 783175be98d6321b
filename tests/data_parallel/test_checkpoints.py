"""What zero1 saves others load, and the other way round, with the bits of an unbroken run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.data_parallel.checkpoints import by_hand, load, save
from tests.harness.marks import only
from tests.harness.ranks import run

ROUTES = [(("zero1", 4), ("zero1", 3)), (("zero1", 2), ("fsdp", 2)), (("fsdp", 2), ("zero1", 3))]
PLAIN = [(("zero1", 2), ("plain", 1)), (("plain", 1), ("zero1", 2))]
FAST = [(PLAIN[1], "muon and adamw")]


@pytest.mark.parametrize(("route", "make"), only(FAST, [*ROUTES, *PLAIN], ["muon and adamw", "soap"]))
def test_every_route(route: tuple[tuple[str, int], tuple[str, int]], make: str, tmp_path: Path) -> None:
    (layout, world), (other, others) = route
    assert run(world, save, layout, make, tmp_path, group=layout != "plain") == [[]] * world
    assert run(others, load, other, make, tmp_path, group=other != "plain") == [[]] * others


@pytest.mark.full
@pytest.mark.parametrize("make", ["muon and adamw", "soap"])
def test_a_state_dict_put_back_by_hand(make: str) -> None:
    assert run(2, by_hand, make) == [[], []]
