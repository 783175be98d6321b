"""Periodic work at another step for every matrix: the bits of an optimizer that was written that way."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import canzona_compile
from canzona_compile.errors import CanzonaError
from canzona_compile.ir.variant_period import repetition, variant_period_of
from examples.optimizers.shampoo import Shampoo
from examples.optimizers.soap import SOAP
from tests.harness.layouts import Case
from tests.harness.marks import first
from tests.harness.pairs import Pair, different, params_of, same_bits
from tests.harness.ranks import do_alone, run
from tests.harness.toy_optimizers import PerParameter

STEPS, EVERY = 14, 4
SHAPES = ((12, 8), (8, 12)) * 5


class Periodic(PerParameter):
    """A basis that is renewed on every fourth step, with a step size that depends on the step.

    `phases` says by how many steps each parameter is ahead, in its counting of fours and in nothing else.
    """

    phases: Mapping[Tensor, int] = {}  # of the plain one, which gets its own

    def __init__(self, params: Any, lr: float = 0.1, special: int = -1) -> None:
        super().__init__(params, lr=lr, beta=0.9, special=special)

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        if not state:
            state.update(step=0, renewals=0, basis=torch.eye(len(param)), average=torch.zeros_like(param))
        state["step"] += 1
        state["average"].lerp_(grad, 1 - group["beta"])
        if state["step"] == group["special"]:
            state["basis"].add_(1)
        if (state["step"] + self.phases.get(param, 0)) % EVERY == 0:
            state["renewals"] += 1
            weight = 1 / (1 + state["step"]) + state["renewals"]
            state["basis"].copy_(torch.linalg.qr(grad @ grad.T + state["basis"] * weight)[0])
        correction = 1 - group["beta"] ** state["step"]
        param.add_(state["basis"] @ state["average"], alpha=-group["lr"] / correction)


class PeriodicInGroup(Periodic):
    """The same, counting in its group."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state["basis"] = torch.eye(len(param))
                if (group["step"] + self.phases.get(param, 0)) % EVERY == 0:
                    basis = torch.linalg.qr(param.grad @ param.grad.T + state["basis"] / group["step"])[0]
                    state["basis"].copy_(basis)
                param.add_(state["basis"] @ param.grad, alpha=-group["lr"])


class PeriodicByDispatch(Periodic):
    """The same for dispatch to capture; its renewals need no numbers of their own."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        if not state:
            state.update(step=0, basis=torch.eye(len(param)), average=torch.zeros_like(param))
        state["step"] += 1
        state["average"].lerp_(grad, 1 - group["beta"])
        print(end="")
        if (state["step"] + self.phases.get(param, 0)) % EVERY == 0:
            state["basis"].copy_(torch.linalg.qr(grad @ grad.T + state["basis"])[0])
        correction = 1 - group["beta"] ** state["step"]
        param.add_(state["basis"] @ state["average"], alpha=-group["lr"] / correction)


KINDS: dict[str, type[Any]] = {"state": Periodic, "dispatch": PeriodicByDispatch, "group": PeriodicInGroup}


def train(kind: str, case: Case | None, special: int = -1, restored: bool = False) -> dict[str, Any]:
    """A wrapped optimizer that staggers, beside a plain one with the offsets that it chose."""
    pair = Pair(partial(KINDS[kind], special=special), SHAPES, case, stagger=True, strategy="owner")
    plain: Any = pair.plain
    names = [f"group0.param{i}" for i in range(len(SHAPES))]
    for step in range(STEPS):
        pair.set("lr", 0.1 / (1 + step))
        pair.go(1)
        if step == 0:
            plan = pair.wrapped.canzona.session.driver.plan
            ahead = plan.stagger.ahead
        # The first step makes the state, and what comes before the period begins is nobody's to stagger.
        plain.phases = {
            p: ahead[n]
            for p, n in zip(params_of(plain), names, strict=True)
            if step + 1 > plan.bound[n].kind.variant_period.start
        }
        if restored and step == STEPS // 2:
            pair.wrapped.load_state_dict(pair.wrapped.state_dict())
    pair.check()
    assert pair.wrapped.state_dict()["param_groups"] == plain.state_dict()["param_groups"]
    assert len(set(ahead.values())) > 2, "an owner has at least three matrices"
    report = pair.report.to_dict()
    assert max(plan.bound[n].kind.variant_period.start for n in names) == max(special - 1, 0)
    assert report["captures"] == (2 + (special > 0)) * len(set(SHAPES))
    assert report["rank_programs"] <= EVERY + 1 + 2 * (special > 0), (
        "before the period begins, steps have programs of their own"
    )
    return {"ahead": dict(ahead), "profile": report["profile"]}


@pytest.mark.parametrize("kind", first(KINDS, 2))
def test_in_one_process(kind: str) -> None:
    do_alone(partial(train, kind, None))


def test_restored() -> None:
    do_alone(partial(train, "state", None, restored=True))


@pytest.mark.full
def test_code_that_runs_once_is_not_skipped() -> None:
    """A special second step, or fifth: nobody is ahead before it is over."""
    for special in (2, 5):
        train("state", None, special=special)


@pytest.mark.full
@pytest.mark.parametrize("case", first([Case("fsdp", (3,)), Case("hsdp", (2, 2)), Case("ddp", (2,))]), ids=str)
def test_on_ranks(case: Case) -> None:
    results = run(case.world, train, "state", case, after=partial(train, "state", None))
    assert all(result == results[0] for result in results), "ranks differ in their offsets"


@pytest.mark.full
@pytest.mark.parametrize("make", first([Shampoo, SOAP]))
def test_worst_step_of_many_matrices(make: Any) -> None:
    """Eigenvectors of 24 matrices, renewed every ten steps: no step takes more than 1.5 times the mean."""
    params = [nn.Parameter(torch.randn(48, 40)) for _ in range(24)]
    optimizer = canzona_compile.wrap(make(params, every=10), stagger=True)
    for _ in range(2):
        for param in params:
            param.grad = torch.randn_like(param)
        optimizer.step()
    report = optimizer.canzona.report()
    together, apart = report.profile.together, report.profile.apart
    assert len(together) == len(apart) == 10
    assert max(together) > 1.2 * sum(together) / 10
    assert max(apart) < 1.1 * sum(apart) / 10  # 24 in ten steps: three on some, two on others
    assert sum(apart) == pytest.approx(sum(together))
    text = report.to_text()
    assert "Profile ── computing per step, over a period of 10 steps" in text
    assert "█ staggered" in text


@pytest.mark.full
@pytest.mark.parametrize("missing", [False, True])
def test_shampoo_with_counters_that_run_ahead(missing: bool) -> None:
    """Shampoo reads its counter for refreshes alone, so that a plain one may simply count further.

    A matrix that missed gradients is ahead of its own counter.
    """
    pair = Pair(partial(Shampoo, lr=0.1, every=5), SHAPES, stagger=True)
    for step in range(STEPS):
        pair.feed(*(i for i in range(len(SHAPES)) if missing and step and (step + i) % 7 == 0))
        pair.take()
        if step == 0:
            plan = pair.wrapped.canzona.session.driver.plan
            for name, param in zip(plan.bound, params_of(pair.plain), strict=True):
                pair.plain.state[param]["step"] += plan.stagger.ahead[name]
    assert different(*pair.both, states=False) == []


@pytest.mark.full
def test_pieces_of_a_fused_weight_are_staggered_apart() -> None:
    weight = torch.randn(24, 8)
    fused = nn.Parameter(weight.clone())
    wrapped: Any = Shampoo([("qkv", fused)], lr=0.1, every=3)
    canzona_compile.wrap(wrapped, stagger=True, split={"qkv": {"q": 8, "k": 8, "v": 8}})
    plain = Shampoo([nn.Parameter(w.clone()) for w in weight.split(8)], lr=0.1, every=3)
    for step in range(12):
        fused.grad = torch.randn(24, 8)
        for param, grad in zip(params_of(plain), fused.grad.split(8), strict=True):
            param.grad = grad.clone()
        wrapped.step()
        plain.step()
        if step == 0:
            ahead = wrapped.canzona.session.driver.plan.stagger.ahead
            assert sorted(ahead.values()) == [0, 1, 2]
            for name, param in zip("qkv", params_of(plain), strict=True):
                plain.state[param]["step"] += ahead[f"qkv[{name}]"]
    assert same_bits(torch.cat([p.detach() for p in params_of(plain)]), fused.detach())


def test_nothing_periodic_has_no_profile() -> None:
    param = nn.Parameter(torch.ones(8, 8))
    optimizer = canzona_compile.wrap(torch.optim.Muon([param]), stagger=True)
    param.grad = torch.ones_like(param)
    optimizer.step()
    assert optimizer.canzona.report().profile is None  # type: ignore[attr-defined]


def test_only_true_or_false() -> None:
    with pytest.raises(CanzonaError, match="stagger=3 is neither True nor False"):
        canzona_compile.wrap(torch.optim.Muon([nn.Parameter(torch.ones(8, 8))]), stagger=3)  # type: ignore[arg-type]


# -- periods of variants --------------------------------------------------------------------------


@given(st.lists(st.sampled_from("ab"), max_size=6), st.lists(st.sampled_from("ab"), min_size=1, max_size=12))
def test_repetition(beginning: list[str], period: list[str]) -> None:
    """What is found explains the path, with no more than it was made of."""
    path = list(itertools.islice(itertools.chain(beginning, itertools.cycle(period)), 128))
    start, length = repetition(path)
    assert start + length <= len(beginning) + len(period)
    assert all(path[i] == path[i + length] for i in range(start, len(path) - length))


@pytest.mark.parametrize("every", [2, 3, 10, 50, 100])
def test_periods_up_to_a_hundred(every: int) -> None:
    path = ["refresh" if i % every == 0 else "plain" for i in range(1, 129)]
    assert repetition(path) == (0, every)


def test_what_does_not_count_has_no_course() -> None:
    assert variant_period_of([], []) is None
    assert variant_period_of(["a", "b"], [{"rank": 3}, {"rank": 3}]) is None
    variant_period = variant_period_of(["a", "b", "a", "b"], [{"rank": 3, "step": 7 + i} for i in range(4)])
    assert variant_period is not None
    assert (variant_period.counters, variant_period.period, variant_period.periodic) == ({"step": 7}, ("a", "b"), True)
    assert variant_period.ahead({"rank": 3, "step": 9}, 2) == {"rank": 3, "step": 11}
