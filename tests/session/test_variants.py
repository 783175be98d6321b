"""Control flow: periodic work, counters that differ, work that is elementwise on some steps only."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

from canzona_compile.session import planning
from tests.harness import toys
from tests.harness.layouts import ALONE, Case
from tests.harness.marks import crossed, first
from tests.harness.pairs import Pair, Shape
from tests.harness.ranks import do_alone, run
from tests.harness.traps.grammar import toy

SHAPES: tuple[Shape, ...] = ((6, 4), (5, 7)) * 2
KINDS = {
    "counting": toys.Counting,
    "refreshing": toys.Refreshing,
    "alternating": toys.Alternating,
    "nesting": toys.Nesting,
    "replacing": toys.Replacing,
    "listing": toys.Listing,
    "untouching": toys.Untouching,
    "in group": toys.CountingInGroup,
    "on itself": toys.CountingOnItself,
    "late": toys.LateCounting,
}


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    return plans_made(monkeypatch)


def plans_made(patch: pytest.MonkeyPatch) -> list[Any]:
    """Every plan that is made."""
    made: list[Any] = []
    original = planning.make_plan

    def counted(*args: Any, **kwargs: Any) -> Any:
        made.append(original(*args, **kwargs))
        return made[-1]

    patch.setattr(planning, "make_plan", counted)
    return made


@pytest.mark.parametrize("kind", first([toys.Refreshing, toys.Alternating]))
def test_variants_are_known_before_they_come(kind: type[Optimizer], plans: list[Any]) -> None:
    pair = Pair(kind, captures_anew=True)
    pair.step()
    captures = pair.report.captures
    assert captures == 2 * 2
    pair.steps(12)
    assert (len(plans), pair.report.captures) == (1, captures)
    assert pair.report.rank_programs == 2
    assert pair.report.fallbacks == {}


def test_the_owner_is_chosen_for_the_heaviest_variant(plans: list[Any]) -> None:
    pair = Pair(toys.Refreshing)
    pair.steps(4)
    owned = plans[-1].owned
    for task in owned.tasks:
        variants = owned.variants()[owned.placed_of(task)]
        assert len(variants) == 2
        assert owned.placed_of(task).flops == max(p.flops for p in variants)
        assert {p.resident for p in variants} == {("basis",)}


def test_a_variant_that_comes_late_is_planned_then(plans: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("canzona_compile.capture.templates.LOOKAHEAD", 0)
    pair = Pair(toys.Refreshing, captures_anew=True)
    pair.steps(9)
    assert len(plans) == 2
    assert pair.report.captures == 2 * 2


def miss_gradients(name: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        plans, pair = plans_made(patch), Pair(KINDS[name], SHAPES)
        pair.step()
        pair.step(1)
        pair.step(2, 3)
        pair.steps(7)
        pair.step(0)
        pair.steps(3)
        assert len(plans) <= 4
        assert pair.report.fallbacks == {}


@pytest.mark.parametrize("name", first(KINDS, 2))
def test_matrices_that_missed_gradients_keep_counters_of_their_own(name: str) -> None:
    do_alone(partial(miss_gradients, name))


@pytest.mark.full
def test_programs_are_kept_in_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("canzona_compile.session.program_cache.MOST_PROGRAMS", 2)
    pair = Pair(toys.Counting, SHAPES)
    pair.step()
    for i in range(4):
        pair.step(i)
        assert pair.report.rank_programs <= 2
    pair.steps(2)


@pytest.mark.parametrize("later", [torch.tensor(0.02), torch.tensor([0.02])], ids=["scalar", "of one element"])
def test_a_number_that_becomes_a_tensor_is_followed(later: Tensor) -> None:
    """And a tensor that becomes a number again, or a tensor of another form."""
    pair = Pair(TimesRate)
    for rate in (0.1, later, later * 3, 0.03, later.double(), later):
        pair.set("lr", rate)
        pair.step()


# Multiplies by the rate, whatever it is.
TimesRate = toy("times-rate")('param.sub_((cube(grad) * group["lr"]).to(param.dtype))')


# Elementwise, with nothing but a counter in its state, which begins by itself.
OnlyCounts = toy("only-counts")("""
    state["steps"] = state.get("steps", 0) + 1
    param.sub_(grad, alpha=group["lr"] / state["steps"])
""")


def test_a_state_of_counters_begins_by_itself() -> None:
    pair = Pair(OnlyCounts)
    pair.steps(4)
    assert {row.how for row in pair.wrapped.canzona.explain().parameters} == {"local"}


def test_a_checkpoint_leads_to_no_new_capture() -> None:
    pair = Pair(toys.Refreshing, captures_anew=True)
    pair.steps(5)
    captures = pair.report.captures
    for optimizer in pair.both:
        optimizer.load_state_dict(optimizer.state_dict())
    pair.steps(7)
    assert pair.report.captures == captures


# -- on ranks ----------------------------------------------------------------------------------


def train(name: str, case: Case, **options: Any) -> None:
    """Ten steps with some gradients missing on all ranks, beside the plain optimizer."""
    pair = Pair(KINDS[name], SHAPES, case=case, **options)
    gaps = {1: [1], 4: [0, 3], 7: [2]}
    for step in range(10):
        pair.step(*gaps.get(step, []))
    assert pair.report.fallbacks == {}


CASES = [Case("fsdp", (3,)), Case("tp_columns", (2,)), Case("hsdp", (2, 2)), Case("ddp", (2,))]


@pytest.mark.parametrize(("name", "case"), crossed(list(KINDS), CASES, most=1), ids=str)
def test_on_ranks(name: str, case: Case) -> None:
    run(case.world, train, name, case, strategy="owner", after=partial(train, name, ALONE))


def train_in_turns(case: Case, **options: Any) -> None:
    """A third of the gradients, then all, whose program needs larger buffers, and a third again.

    Micro-groups mix wires of odd numbers of bytes with wires of four bytes per element.
    """
    pair = Pair(toys.Keeping, ((5, 7), (6, 4)) * 3, case=case, **options)
    for missing in [(2, 3, 4, 5)] * 3 + [()] * 2 + [(2, 3, 4, 5)] * 2:
        pair.step(*missing)
    assert pair.report.fallbacks == {}


@pytest.mark.parametrize("micro_groups", [1, 3])
def test_programs_that_share_buffers_take_turns(micro_groups: int) -> None:
    after = partial(train_in_turns, ALONE)
    run(2, train_in_turns, Case("fsdp", (2,)), strategy="owner", micro_groups=micro_groups, after=after)
