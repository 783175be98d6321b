"""Figures of a plan made offline: each is what its definition says, by hand or against those of a real step."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import sympy
import torch
from torch import nn

import canzona_compile
from canzona_compile.ir.step import Phase
from canzona_compile.machine.hardware import named_hardware
from canzona_compile.report.build import make_report
from canzona_compile.report.schema import Facts, Figures, TemplateReport
from tests.harness.marks import also
from tests.harness.traps.grammar import toy

Q, UP = (48, 48), (48, 80)
SHAPES = {f"layers.{i}.{name}": shape for i in range(4) for name, shape in (("q", Q), ("up", UP))}
ELEMENTS = 4 * (48 * 48 + 48 * 80)
UNEVEN = {"a": (7, 5), "b": {"shape": (7, 5), "tp": 0}, "c": {"shape": (7, 5), "tp": 1}, "d": (7, 5), "e": (7, 5)}
# Twice as wide is four times as much to carry and eight times as much to do, so that planners differ.


def planned(shapes: Any, mesh: str, **options: Any) -> canzona_compile.OfflinePlan:
    return canzona_compile.plan(shapes, mesh=mesh, **{"strategy": "owner", "alternatives": False, **options})


def value(formula: str, template: TemplateReport) -> int:
    """A formula of m and n, evaluated for the template's shape."""
    m, n = (sympy.Symbol(name, positive=True, integer=True) for name in "mn")
    expression = sympy.sympify(formula, locals={"m": m, "n": n})
    return int(expression.subs(dict(zip((m, n), template.shape, strict=True))))


@pytest.fixture(scope="module")
def sharded() -> canzona_compile.OfflinePlan:
    """With alternatives."""
    return planned(SHAPES, "fsdp=4", alternatives=True)


@pytest.fixture(scope="module")
def replicated() -> canzona_compile.OfflinePlan:
    """DDP, where replicas have gathered nothing yet and exchange what they computed."""
    return planned(SHAPES, "dp=4")


# -- one matrix by hand ----------------------------------------------------------------------------


def test_formulas_give_the_values(sharded: canzona_compile.OfflinePlan) -> None:
    templates = sharded.forecast.templates
    assert {(t.shape, t.tasks) for t in templates} == {(Q, 4), (UP, 4)}
    for template in templates:
        assert value(template.formula, template) == template.flops


def test_newton_schulz_by_hand(sharded: canzona_compile.OfflinePlan) -> None:
    found = sharded.forecast
    template, cost = next(both for both in zip(found.templates, found.costs, strict=True) if both[0].shape == UP)
    m, n = UP
    # Five steps of X X^T, its square, and the product with X; the norm and the division by it; a clamp.
    assert template.flops == 5 * (2 * m * m * n + 2 * m**3 + 2 * m * m * n) + 2 * m * n + 1
    assert sum(wire.bytes for wire in template.wires) == 2 * m * n + 2 * m * n  # bfloat16 there and back
    assert cost.memory_bytes >= 5 * 2 * (2 * m * n + 3 * m * m)  # at least what products read and write
    assert cost.seconds >= cost.memory_bytes / named_hardware("h100").bandwidth


@pytest.mark.full
@pytest.mark.parametrize("name", [*also(["soap"]), "shampoo"])
def test_formulas_of_decompositions_give_the_values(name: str) -> None:
    (template,) = planned({"a": (6, 4)}, "fsdp=2", optimizer=name).forecast.templates
    assert value(template.formula, template) == template.flops
    assert sum(wire.bytes for wire in template.wires) == (4 + 4) * 6 * 4


# -- against a real step's report ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mesh", "strategy"),
    [
        *((mesh, "owner") for mesh in ("fsdp=4", "hsdp=2,fsdp=2", "dp=4", "fsdp=2,tp=2", "tp=2,dp=2")),
        *((mesh, "replicated") for mesh in ("fsdp=4", "hsdp=2,fsdp=2")),
    ],
)
def test_figures_are_those_of_the_report(mesh: str, strategy: str) -> None:
    made = planned(UNEVEN, mesh, strategy=strategy, micro_groups=2, hardware="cpu")
    found, report = made.forecast, make_report(made.step, Facts(world_size=4))
    assert {
        field.name for field in fields(Figures) if getattr(found, field.name) != getattr(report, field.name)
    } == set()
    sent = sum(g.gather_bytes + g.scatter_bytes + g.exchange_bytes for g in found.micro_groups)
    assert sum(count for *_, count in found.simulation.sent) == sent > 0


# -- loads and planners ----------------------------------------------------------------------------


def test_alpha_may_be_anything_between_0_and_1() -> None:
    shapes = {f"w{i}": Q for i in range(9)}
    for alpha in (0, 0.3):
        found = planned(shapes, "dp=4", planner="alpha", alpha=alpha).forecast
        assert (dict(found.options)["planner"], dict(found.options)["alpha"]) == ("alpha", str(alpha))
        assert found.imbalance == pytest.approx(3 / (9 / 4))


def test_alternatives(sharded: canzona_compile.OfflinePlan) -> None:
    found = {one.name: one for one in sharded.forecast.alternatives}
    assert [one.name for one in found.values() if one.chosen] == ["lpt-swap"]
    everywhere = found.pop("replicated")
    assert everywhere.imbalance == 1.0
    assert everywhere.sent > 0
    own = [one for one in found.values() if one.name in ("alpha", "lpt", "lpt-swap")]
    assert len(own) == 3
    assert all(one.seconds < everywhere.seconds for one in own)
    assert all(one.imbalance >= 1 and one.peak > 0 for one in own)
    assert found["lpt-swap"].seconds == sharded.forecast.simulation.seconds


# -- who computes, who applies ---------------------------------------------------------------------


def test_replicas_exchange_and_gather_nothing(replicated: canzona_compile.OfflinePlan) -> None:
    assert {phase for _, phase, _ in replicated.forecast.simulation.sent} == {str(Phase.EXCHANGE)}
    assert sum(g.exchange_bytes for g in replicated.forecast.micro_groups) == 2 * ELEMENTS * 3
    assert any("every replica applies all updates" in text for text in replicated.forecast.assumptions)


def test_updates_by_the_owner_s_replica_alone_take_less(replicated: canzona_compile.OfflinePlan) -> None:
    sparing = planned(SHAPES, "dp=4", updates="zero1")
    assert sparing.forecast.simulation.seconds < replicated.forecast.simulation.seconds
    assert sparing.forecast.zero1 is not None
    assert replicated.forecast.zero1 is None
    assert [(t.name, t.owner) for t in sparing.forecast.tasks] == [(t.name, t.owner) for t in replicated.forecast.tasks]
    assert sparing.forecast.loads[0].flops == replicated.forecast.loads[0].flops
    assert sparing.fingerprint != replicated.fingerprint, "it has buckets"
    assert not sparing.forecast.simulation.sent, "nothing travels in the step"


# -- time ------------------------------------------------------------------------------------------


def test_stages_work_side_by_side() -> None:
    found = planned(SHAPES, "pp=2,fsdp=2").forecast
    assert [load.tasks for load in found.loads] == [2, 2, 2, 2]
    early = {t.owner for t in found.tasks if t.name.startswith(("layers.0", "layers.1"))}
    late = {t.owner for t in found.tasks if t.name.startswith(("layers.2", "layers.3"))}
    assert (early, late) == ({0, 1}, {2, 3})


# Steps matrices, or each entry of a stack.
StackSGD = toy("stack-sgd", update="grad @ (grad.mT @ grad)")()


@pytest.mark.full
def test_experts_are_owned_where_they_lie() -> None:
    shapes = {name: {"shape": [4, 48, 32], "experts": True} for name in ("gate", "up")}
    found = planned(shapes, "fsdp=4,ep=2").forecast  # a range of each stack on each rank
    assert [t.name for t in found.tasks] == [
        f"{name}@{part}[{i}:{i + 1}]" for name in shapes for part in (0, 1) for i in (0, 1)
    ]
    assert {t.shape for t in found.tasks} == {(1, 48, 32)}
    owners = {part: {t.owner for t in found.tasks if f"@{part}" in t.name} for part in (0, 1)}
    assert owners == {0: {0, 2, 4, 6}, 1: {1, 3, 5, 7}}
    whole = planned(shapes, "fsdp=4,ep=2", optimizer=StackSGD).forecast
    assert [(t.name, t.shape) for t in whole.tasks] == [(f"{n}@{part}", (2, 48, 32)) for n in shapes for part in (0, 1)]


# -- memory ----------------------------------------------------------------------------------------


def test_state_is_four_bytes_per_element_and_rank(
    sharded: canzona_compile.OfflinePlan, replicated: canzona_compile.OfflinePlan
) -> None:
    for made in (sharded, replicated):  # fragments of the momentum; the momentum of those that a rank owns
        assert made.forecast.memory.state == 4 * ELEMENTS // 4
        assert made.forecast.memory.state_replicated == 4 * ELEMENTS


def test_a_capacity_makes_more_groups_and_smaller_buffers() -> None:
    shapes = {f"w{i}": UP for i in range(8)}
    size = 2 * 48 * 80  # what an owner gathers of one
    free, tight = (planned(shapes, "fsdp=2", hardware="cpu", **given) for given in ({}, {"capacity": size}))
    assert (len(free.forecast.micro_groups), len(tight.forecast.micro_groups)) == (1, 4)
    assert tight.forecast.memory.buffers < free.forecast.memory.buffers
    assert tight.forecast.memory.one_group == free.forecast.memory.one_group == free.forecast.memory.buffers


# -- arguments -------------------------------------------------------------------------------------


@pytest.mark.full
def test_the_hyperparameters_of_an_optimizer_count(sharded: canzona_compile.OfflinePlan) -> None:
    fewer = torch.optim.Muon([nn.Parameter(torch.zeros(2, 2))], ns_steps=2)
    (template,) = planned({"a": UP}, "fsdp=2", optimizer=fewer).forecast.templates
    same = planned({"a": UP}, "fsdp=2", optimizer=torch.optim.Muon, arguments={"ns_steps": 2})
    (usual,) = (t for t in sharded.forecast.templates if t.shape == UP)
    assert template.flops == same.forecast.templates[0].flops
    assert usual.flops - template.flops == 3 * (4 * 48 * 48 * 80 + 2 * 48**3)


@pytest.mark.full
def test_an_optimizer_that_needs_no_whole_matrices() -> None:
    made = planned(SHAPES, "fsdp=2", optimizer=torch.optim.AdamW)
    found = made.forecast
    assert (found.matrices, found.elementwise, found.collectives_per_step) == (0, len(SHAPES), 0)
    assert (found.simulation.seconds, found.imbalance) == (0, 1.0)
    assert "8 parameters updated elementwise" in made.to_text()


def test_one_rank_alone() -> None:
    made = planned(SHAPES, "fsdp=1", alternatives=True)
    assert {t.strategy for t in made.forecast.tasks} == {"local"}
    assert (made.forecast.collectives_per_step, made.forecast.imbalance) == (0, 1.0)
    assert [one.name for one in made.forecast.alternatives] == ["lpt-swap"]
    assert made.forecast.simulation.seconds > 0
