"""Forecasts lower a scheduled step anew; every form on the way keeps its promises."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest

from canzona_compile.ir.options import Options
from canzona_compile.ir.pipeline import PassHistory, run
from canzona_compile.ir.printer import show
from canzona_compile.ir.step import Form, Step, Strategy
from canzona_compile.passes import OwnerReplica, Reopen, lowering_passes, planning_passes, relowering_passes
from tests.harness.samples import grid_of, muon_step

OWNERS = Options(strategy="owner", micro_groups=2)
GRIDS = [(1, 1), (1, 2), (4, 1), (2, 2)]


@dataclass(frozen=True, slots=True)
class ComputeEverywhere:
    """Every rank computes the first task."""

    name: ClassVar[str] = "compute-everywhere"
    requires: ClassVar[Form] = Form.OWNED
    ensures: ClassVar[Form] = Form.OWNED

    def __call__(self, step: Step) -> Step:
        first, *others = step.tasks
        return replace(step, tasks=(replace(first, owner=None, strategy=Strategy.REPLICATED), *others))


def scheduled(grid: tuple[int, int], mixed: bool = False) -> Step:
    step = muon_step(grid_of(*grid), *[(64, 32)] * 4)
    between = [ComputeEverywhere()] if mixed else []
    return run(step, [*planning_passes(OWNERS), *between, *lowering_passes(OWNERS)])[0]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_it_is_the_same_step_but_for_what_other_options_change(grid: tuple[int, int]) -> None:
    step = scheduled(grid)
    assert show(run(step, relowering_passes(OWNERS))[0]) == show(step)
    assert len(run(step, relowering_passes(replace(OWNERS, micro_groups=1)))[0].micro_groups) == 1


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("grid", [(4, 1), (2, 2)], ids=str)
def test_only_the_replica_of_the_owner_updates(grid: tuple[int, int], mixed: bool) -> None:
    step = scheduled(grid, mixed)
    history: PassHistory = run(step, [Reopen(), OwnerReplica(), *lowering_passes(OWNERS)])[1]
    moved = history.step_at(Form.SCHEDULED)
    for before, after in zip(step.tasks, moved.tasks, strict=True):
        if before.owner is None:
            assert after == before
            continue
        assert after.layout.grid.ranks == (before.layout.grid.ranks[before.owner[0]],)
        assert after.owner == (0, before.owner[1])
        assert after.strategy is (Strategy.LOCAL if grid[1] == 1 else Strategy.OWNER)
        assert not moved.placed_of(after).kind.replicated
        assert moved.placed_of(after).flops == step.placed_of(before).flops
    assert {p.name for p in moved.placed} == {t.placed for t in moved.tasks}
    assert all(group.exchange is None for group in moved.micro_groups)
