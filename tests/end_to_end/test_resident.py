"""Residents: optimizers that keep things on themselves, or draw, run as one object per matrix, with equal bits."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

import canzona_compile
from canzona_compile.errors import CanzonaError, UnsupportedOptimizer
from canzona_compile.replica.object_state import KeptPlace, put
from tests.harness import resident_optimizers as kinds
from tests.harness import small_runs
from tests.harness.checkpoint_routes import LOAD, SAVE
from tests.harness.layouts import Case, Laid, full
from tests.harness.marks import first, only
from tests.harness.pairs import Pair, feed, parameters, same_bits
from tests.harness.ranks import do_alone, run
from tests.harness.resident_optimizers import MAKERS, Oracle
from tests.harness.small_runs import SmallRun, rate

SHAPES = ((7, 5), (5, 8), (6, 6))
SAVED, END = 4, 7
ALONE = Case("plain", ())
pytestmark = pytest.mark.filterwarnings("ignore:.* draws random numbers")


drawn = partial(small_runs.drawn, SHAPES)


def part_of(name: str, case: Case, begun: bool = True, **options: Any) -> SmallRun:
    return SmallRun(MAKERS[name], SHAPES, case, begun, **{"strategy": "owner", **options})


def expected(name: str, stop: int = END) -> list[Tensor]:
    oracle = Oracle(name, drawn(-1))
    for step in range(stop):
        oracle.set("lr", rate(step))
        oracle.step(drawn(step))
    return [p.detach() for p in oracle.params]


def different(found: list[Tensor], wanted: list[Tensor]) -> list[int]:
    return [i for i, (a, b) in enumerate(zip(found, wanted, strict=True)) if not same_bits(a, b)]


def train(name: str, case: Case, **options: Any) -> tuple[list[int], list[str]]:
    part = part_of(name, case, **options)
    part.steps(0, END)
    hows = [row.cell for row in part.optimizer.canzona.explain().parameters]
    return different(part.values(), expected(name)), hows


def alone(name: str) -> None:
    """Train in one process. Ranks that have it behind them need not rehearse anew."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* draws random numbers")
        assert train(name, ALONE) == ([], ["own object"] * 3)


@pytest.mark.parametrize("name", first(MAKERS, 2))
def test_in_one_process(name: str) -> None:
    do_alone(partial(alone, name))


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("name", "case"),
    only(
        [("blocked", Case("fsdp", (3,))), ("probing", Case("ddp", (2,))), ("by parameter", Case("fsdp", (2,)))],
        list(MAKERS),
        [Case("fsdp", (2,)), Case("fsdp", (3,)), Case("ddp", (2,)), Case("tp_columns", (2,))],
    ),
    ids=str,
)
def test_on_ranks(name: str, case: Case) -> None:
    assert run(case.world, train, name, case, after=partial(alone, name)) == [([], ["own object"] * 3)] * case.world


@pytest.mark.ranks
def test_every_rank_computes_every_matrix() -> None:
    """Their generators are those of the matrix, so the copies do not drift apart."""
    found = run(2, train, "probing", Case("ddp", (2,)), strategy="replicated", after=partial(alone, "probing"))
    assert found == [([], ["own object"] * 3)] * 2


# -- checkpoints -----------------------------------------------------------------------------------


def save(name: str, case: Case, folder: Path, ways: list[str]) -> None:
    part = part_of(name, case)
    part.steps(0, SAVED)
    for way in ways:
        SAVE[way](part, folder / way)  # type: ignore[arg-type]


def load(name: str, case: Case, folder: Path, way: str) -> list[int]:
    part = part_of(name, case, begun=False)
    LOAD[way][1](part, folder / LOAD[way][0])  # type: ignore[arg-type]
    part.steps(SAVED, END)
    return different(part.values(), expected(name))


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("name", "case"),
    only(
        [("probing by parameter", Case("fsdp", (2,)))],
        list(MAKERS),
        [Case("fsdp", (2,)), Case("ddp", (2,)), ALONE],
    ),
    ids=str,
)
def test_saved_on_four_ranks_and_loaded_on_others(name: str, case: Case, tmp_path: Path) -> None:
    ways = ["shards", "flat shards", "by hand"]
    after = partial(alone, name)
    run(4, save, name, Case("fsdp", (4,)), tmp_path, ways, after=after)
    for way in ways:
        found = run(case.world, load, name, case, tmp_path, way, group=bool(case.mesh), after=after)
        assert found == [[]] * case.world, way


def test_saved_state_is_plain(tmp_path: Path) -> None:
    part = part_of("blocked", ALONE)
    part.steps(0, 2)
    torch.save(part.optimizer.state_dict(), tmp_path / "state.pt")
    found = torch.load(tmp_path / "state.pt", weights_only=True)["state"][0]
    assert {"self/blocks/0/1/factors/0", "self/blocks/0/1/step", "state/average", "generator"} <= found.keys()
    assert all(isinstance(value, Tensor | int | float) for value in found.values())
    assert not any("config" in path for path in found)  # it does not change


def test_a_leaf_without_a_place_is_named() -> None:
    part = part_of("by parameter", ALONE)
    part.steps(0, 2)
    saved = part.optimizer.state_dict()
    saved["state"][1]["self/other"] = torch.ones(2)
    other = part_of("by parameter", ALONE)
    other.optimizer.load_state_dict(saved)
    with pytest.raises(CanzonaError, match="self/other is saved but does not exist") as caught:
        other.steps(2, 3)
    assert caught.value.at == "group0.param1"


def test_a_tensor_that_inference_mode_made_is_put_back_in_place() -> None:
    with torch.inference_mode():
        there = torch.zeros(3)
    put(KeptPlace(there, lambda _: pytest.fail("another tensor")), torch.ones(3))
    assert torch.equal(there, torch.ones(3))


def test_state_of_a_plain_optimizer_is_refused() -> None:
    pair = Pair(MAKERS["blocked"], SHAPES)
    feed(pair.plain, 0)
    pair.plain.step()
    pair.wrapped.load_state_dict(pair.plain.state_dict())
    feed(pair.wrapped, 0)
    with pytest.raises(CanzonaError, match="plain optimizer has already stepped"):
        pair.wrapped.step()


# -- plans and edits -------------------------------------------------------------------------------


def grown(case: Case) -> list[int]:
    """Parameters come later, and the plan is made anew twice, with other owners."""
    values = drawn(-1)
    laid = Laid(values, case)
    plain = kinds.MomentsByParameter([torch.nn.Parameter(v.clone()) for v in values[:1]])
    wrapped: Any = canzona_compile.wrap(kinds.MomentsByParameter(laid.params[:1]), strategy="owner")
    for step in range(6):
        if step == 2:
            plain.add_param_group({"params": [torch.nn.Parameter(v.clone()) for v in values[1:]], "beta": 0.5})
            wrapped.add_param_group({"params": laid.params[1:], "beta": 0.5})
        if step == 4:
            wrapped.canzona.release()
        own = [p for group in plain.param_groups for p in group["params"]]
        for i, (param, grad) in enumerate(zip(own, drawn(step), strict=False)):
            param.grad = grad.clone()
            laid.params[i].grad = laid.like_param(grad, i)
        plain.step()
        wrapped.step()
    return different([full(p) for p in laid.params], [p.detach() for p in own])


@pytest.mark.full
def test_new_plans() -> None:
    assert grown(ALONE) == []


@pytest.mark.full
@pytest.mark.ranks
def test_new_plans_on_ranks() -> None:
    assert run(2, grown, Case("fsdp", (2,))) == [[], []]


def counting(case: Case) -> tuple[list[int], int]:
    """Train with a counter for all parameters, in 7 steps."""
    part = part_of("counting", case)
    part.steps(0, END)
    return different(part.values(), expected("counting")), part.optimizer.clock["steps"]


@pytest.mark.ranks
def test_a_counter_for_all_is_shown_on_every_rank() -> None:
    """One of the four owns nothing."""
    assert run(4, counting, Case("fsdp", (4,)), after=partial(counting, ALONE)) == [([], END)] * 4


@pytest.mark.full
def test_a_counter_for_all_refuses_parameters_that_come_later() -> None:
    wrapped = canzona_compile.wrap(kinds.CountingTogether(parameters(SHAPES[:2])))
    feed(wrapped, 0)
    wrapped.step()
    wrapped.add_param_group({"params": parameters(SHAPES[2:])})
    feed(wrapped, 1)
    with pytest.raises(CanzonaError, match="added after others had stepped") as caught:
        wrapped.step()
    assert caught.value.at == "group1.param0"


def test_attributes_that_users_change_are_followed_or_refused() -> None:
    pair = Pair(MAKERS["by index"], SHAPES, captures_anew=True, compares_state=False)
    pair.step()
    for optimizer in pair.both:
        optimizer.decay = 0.2  # type: ignore[union-attr]
    pair.step()
    pair.wrapped.moments[0].data = torch.zeros(2)
    pair.wrapped.moments.append(torch.zeros(1))
    feed(pair.wrapped, 5)
    for _ in range(2):
        with pytest.raises(UnsupportedOptimizer, match=r"self.moments.* changed"):
            pair.wrapped.step()


@pytest.mark.full
def test_cleared_state_begins_anew() -> None:
    first, second = part_of("blocked", ALONE), part_of("blocked", ALONE)
    first.steps(0, 2)
    with torch.no_grad():
        for own, other in zip(first.laid.params, second.laid.params, strict=True):
            own.copy_(other)
    first.optimizer.state.clear()
    first.steps(0, 3)
    second.steps(0, 3)
    assert different(first.values(), second.values()) == []


def test_missing_gradients() -> None:
    pair = Pair(MAKERS["by parameter"], SHAPES, compares_state=False)
    for missing in ([], [1], [0, 2], []):
        pair.step(*missing)


def test_it_cannot_be_unwrapped_once_it_stepped() -> None:
    part = part_of("blocked", ALONE)
    part.steps(0, 1)
    with pytest.raises(CanzonaError, match="cannot be merged back"):
        canzona_compile.unwrap(part.optimizer)
    part.steps(1, END)  # it is still wrapped
    assert different(part.values(), expected("blocked")) == []


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda params: kinds.Forgetful(params, 2.0), "constructor needs 'basis'"),
        (lambda params: kinds.Renaming(params, power=2.0), r"self.powers\[0\]"),
        (lambda params: kinds.SharedBuffer(params), "depends on other parameters"),
        (lambda params: kinds.Anchored(params), "constructor keeps values of parameters in self.anchors"),
        (lambda params: kinds.Logging(params), "self.norms"),
    ],
    ids=["forgetful", "renaming", "shared", "anchored", "logging"],
)
def test_what_cannot_run_so_is_refused(make: Callable[[list[Any]], Optimizer], reason: str) -> None:
    wrapped = canzona_compile.wrap(make(parameters(SHAPES)))
    feed(wrapped, 0)
    before = [p.detach().clone() for p in wrapped.param_groups[0]["params"]]
    with pytest.raises(UnsupportedOptimizer, match=reason):
        wrapped.step()
    assert different([p.detach() for p in wrapped.param_groups[0]["params"]], before) == []


def test_reports_say_so() -> None:
    part = part_of("blocked", ALONE)
    row = canzona_compile.explain(part.optimizer).parameters[0]  # before the first step
    assert (row.cell, "one whole optimizer object per matrix" in row.why) == ("own object", True)
    part.steps(0, 1)
    assert "one whole optimizer object per matrix" in part.optimizer.canzona.report().to_text(width=400)
