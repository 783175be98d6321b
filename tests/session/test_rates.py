"""Ranks that share matrices measure the rates that their plan depends on, before they make it."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.optim import AdamW, Muon

import canzona_compile
from canzona_compile.compat.duplex import SECOND
from canzona_compile.errors import CanzonaError
from canzona_compile.ir.options import Options
from canzona_compile.ir.plan_file import PlanFile, read_plan
from canzona_compile.machine.hardware import HERE, assumed_hardware, hardware_from
from canzona_compile.runtime import process_groups
from canzona_compile.session import rates
from examples.optimizers.soap import SOAP
from tests.harness.layouts import Case, Laid, full
from tests.harness.marks import crossed, first
from tests.harness.mistakes import attempt
from tests.harness.optimizers import rates_measured, share_captures
from tests.harness.ranks import run

SHAPES = ((48, 24), (24, 60), (12, 36), (48, 24))
Make = Callable[[list[Tensor]], Any]


def values() -> list[Tensor]:
    random = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=random) for shape in SHAPES]


def gradients(step: int) -> list[Tensor]:
    random = torch.Generator().manual_seed(1 + step)
    return [torch.randn(shape, generator=random) for shape in SHAPES]


def muon(params: list[Tensor]) -> Muon:
    return Muon(params, lr=0.1)


def soap(params: list[Tensor]) -> SOAP:
    return SOAP(params, lr=0.1)


def plain_steps(make: Make, count: int = 2) -> list[Tensor]:
    params = [torch.nn.Parameter(value) for value in values()]
    optimizer = make(params)
    for step in range(count):
        for param, grad in zip(params, gradients(step), strict=True):
            param.grad = grad
        optimizer.step()
    return [param.detach() for param in params]


def trained(make: Make, case: Case, count: int = 2, shared: bool = True, **options: Any) -> tuple[Any, list[Tensor]]:
    """A wrapped optimizer after some steps, and its whole parameters."""
    laid = Laid(values(), case)
    optimizer = canzona_compile.wrap(make(list(laid.params)), **options)
    if shared:
        share_captures(optimizer)
    for step in range(count):
        for i, (param, grad) in enumerate(zip(laid.params, gradients(step), strict=True)):
            param.grad = laid.like_param(grad, i)
        optimizer.step()
    return optimizer, [full(param) for param in laid.params]


def measured(make: Make, case: Case) -> tuple[str, str, str, list[Tensor]]:
    """The rates of this rank, its plan, what a run that follows the plan plans, and the parameters."""
    with rates_measured():
        optimizer, weights = trained(make, case)
        found = optimizer.canzona.session.options.measured
        plan = optimizer.canzona.plan()
        assert "links measured" in str(optimizer.canzona.report())
        follower, again = trained(make, case, plan=json.loads(plan.to_json()))
        assert follower.canzona.session.options.measured is None
        assert all(map(torch.equal, weights, again))
    return found.to_json(), plan.to_json(), follower.canzona.plan().to_json(), weights


@pytest.mark.parametrize(
    ("make", "case"),
    crossed([muon, soap], [Case("fsdp", (2,)), Case("hsdp", (2, 2))]),
    ids=lambda own: getattr(own, "__name__", str(own)),
)
def test_all_ranks_find_the_same_and_compute_the_bits_of_the_plain_optimizer(make: Make, case: Case) -> None:
    expected = plain_steps(make)
    (found, plan, followed, _), *_ = told = run(case.world, measured, make, case, after=partial(plain_steps, make))
    assert {own[:3] for own in told} == {(found, plan, followed)}
    assert json.loads(plan)["rates"] == json.loads(followed)["rates"] == json.loads(found)
    assert json.loads(plan)["fingerprint"] == json.loads(followed)["fingerprint"]
    assert all(all(map(torch.equal, weights, expected)) for *_, weights in told)
    hardware = hardware_from(json.loads(found), "a rank")
    assert hardware.name == HERE
    assert {"node", "products"} <= set(hardware.measured)
    assert 0.0 <= hardware.overlap <= 1.0


def unequal(make: Make, case: Case) -> tuple[str, str, str, list[Tensor]]:
    """The last rank has a slow link, and cores that compute half as fast."""
    timed, lasting = rates.LinkTimer.timed, rates.lasting
    slow = int(torch.distributed.get_rank() == case.world - 1)
    with (
        mock.patch.object(rates.LinkTimer, "timed", lambda *args: timed(*args) * (1 + 9 * slow)),
        mock.patch.object(rates, "lasting", lambda *args: lasting(*args) * (1 + slow)),
    ):
        return measured(make, case)


@pytest.mark.parametrize("case", first([Case("hsdp", (2, 2)), Case("tp_columns", (3,))]), ids=str)
def test_ranks_of_unequal_speed_have_one_plan(case: Case) -> None:
    told = run(case.world, unequal, muon, case, after=partial(plain_steps, muon))
    assert len({own[:3] for own in told}) == 1


def without() -> list[bool]:
    """What measures nothing: elementwise optimizers, and rates that are given or assumed."""
    case, found = Case("fsdp", (2,)), []
    with rates_measured():
        for make, options in (
            (lambda params: AdamW(params, lr=0.1), {}),
            (muon, {"hardware": "assumed"}),
            (muon, {"hardware": "h100"}),
        ):
            optimizer, _ = trained(make, case, **options)
            found.append(optimizer.canzona.session.options.measured is None)
    return found


def test_nothing_is_measured_that_no_plan_depends_on() -> None:
    assert run(2, without) == [[True] * 3] * 2


def plans() -> list[str]:
    case = Case("fsdp", (2,))
    return [trained(muon, case, hardware=name)[0].canzona.plan().fingerprint for name in ("assumed", "cpu")]


def test_assumed_rates_are_those_of_a_usual_machine() -> None:
    ((assumed, named), *others) = run(2, plans)
    assert assumed == named
    assert others == [[assumed, named]]


def differently(rank_of_error: int) -> list[Any]:
    """One rank cannot bind, and all raise, and the next step is taken; or has other rates, or a plan."""
    case, rank = Case("fsdp", (2,)), torch.distributed.get_rank()
    found = []
    with rates_measured():
        laid = Laid(values(), case)
        optimizer = canzona_compile.wrap(muon(list(laid.params)))
        share_captures(optimizer)
        for i, (param, grad) in enumerate(zip(laid.params, gradients(0), strict=True)):
            param.grad = laid.like_param(grad, i)
        if rank == rank_of_error:
            laid.params[0].requires_grad_(False)
            optimizer.param_groups[0]["params"].append(torch.nn.Parameter(torch.ones(3, 3).to_sparse()))
        found.append(attempt(optimizer.step))
        if rank == rank_of_error:
            laid.params[0].requires_grad_(True)
            optimizer.param_groups[0]["params"].pop()
        optimizer.step()
        options = {"hardware": "cpu"} if rank == rank_of_error else {}
        found.append(attempt(lambda: trained(muon, case, shared=False, **options)))
        options = {"plan": optimizer.canzona.plan()} if rank == rank_of_error else {}
        found.append(attempt(lambda: trained(muon, case, shared=False, **options)))
    return [(own.error, own.said) for own in found]


def test_a_rank_that_cannot_plan_lets_no_other_one_wait() -> None:
    for (early, _), *others in run(2, differently, 1, fresh=True):
        assert early
        for error, said in others:
            assert error == "RankMismatch"
            assert "hardware=" in said


def planned(make: Make, case: Case, every: list[dict[str, Any]]) -> list[list[Tensor]]:
    """The parameters after steps by plans of several options."""
    return [trained(make, case, **options)[1] for options in every]


def any_options(seed: int) -> dict[str, Any]:
    random = Random(seed)
    planner = random.choice(["lpt", "lpt-swap", "alpha"])
    return {
        "micro_groups": random.choice([None, 1, 2, 3, 8]),
        "depth": random.choice([1, 2, 3]),
        "strategy": random.choice(["auto", "owner", "replicated"]),
        "capacity": random.choice([None, 1, 4096]),
        "planner": planner,
        **({"alpha": random.random()} if planner == "alpha" else {}),
    }


@pytest.mark.parametrize("case", first([Case("fsdp", (2,)), Case("hsdp", (2, 2)), Case("tp_columns", (3,))]), ids=str)
@pytest.mark.parametrize("make", first([muon, soap]))
def test_bits_do_not_depend_on_the_plan(make: Make, case: Case) -> None:
    every = [any_options(seed) for seed in range(8)]
    expected = plain_steps(make)
    for weights in run(case.world, planned, make, case, every, after=partial(plain_steps, make)):
        wrong = [
            options for options, own in zip(every, weights, strict=True) if not all(map(torch.equal, own, expected))
        ]
        assert wrong == []


def both_ways(make: Make, case: Case) -> tuple[bool, list[Tensor]]:
    """Whether exchanges go both ways at once, and the parameters after steps."""
    with rates_measured(), mock.patch.object(process_groups, "LARGE", 0):
        optimizer, weights = trained(make, case)
    groups = optimizer.canzona.session.groups.known
    return any(group in SECOND for group in groups), weights


@pytest.mark.parametrize("case", first([Case("hsdp", (2, 2)), Case("tp_columns", (3,))]), ids=str)
@pytest.mark.parametrize("make", first([muon, soap]))
def test_bits_do_not_depend_on_how_ranks_exchange(make: Make, case: Case) -> None:
    expected = plain_steps(make)
    for both, weights in run(case.world, both_ways, make, case, fresh=True, after=partial(plain_steps, make)):
        assert both
        assert all(map(torch.equal, weights, expected))


# -- the figures ---------------------------------------------------------------------------------------


def test_the_slowest_counts_and_is_rounded() -> None:
    found: rates.Slowness = {"node": {"latency": 1e-4, "seconds_per_byte": 1e-9, "exposed": 0.2}}
    rates.slower(found, {"node": {"latency": 2e-4, "seconds_per_byte": 5e-10, "exposed": 0.33}})
    assert found == {"node": {"latency": 2e-4, "seconds_per_byte": 1e-9, "exposed": 0.33}}
    assert rates.rounded(1.0) == 1.0
    assert rates.rounded(1.1) == rates.rounded(0.95) == 1.0
    assert rates.rounded(1.2) == rates.STEP


def test_rates_are_those_of_options_or_of_a_plan() -> None:
    with pytest.raises(CanzonaError, match="rates is not an object"):
        read_plan({**PlanFile("Muon", 2, (), (), (), "").to_dict(), "rates": 3})
    with pytest.raises(CanzonaError, match="hardware="):
        canzona_compile.wrap(muon(values()), hardware=3)
    assert Options(hardware="assumed").rates is None
    assert Options(measured=assumed_hardware("cpu")).rates == assumed_hardware("cpu")
