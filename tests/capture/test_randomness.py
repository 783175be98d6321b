"""Optimizers that draw random numbers: on one rank per matrix, with a warning; and never in a trial of ours."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Muon, Optimizer

import canzona_compile
from canzona_compile.errors import CanzonaError, UnsupportedOptimizer
from tests.harness.layouts import Case, Laid, full
from tests.harness.marks import first
from tests.harness.ranks import run
from tests.harness.toy_optimizers import HostReading, State
from tests.harness.traps.grammar import toy

# Its first step begins with a random projection, as GaLore's does.
RandomState = toy("random-state")("""
    if not state:
        state["projection"] = torch.randn(len(param), len(param))
    param.add_(state["projection"] @ grad, alpha=-group["lr"])
""")


# Draws on every step, in code that can be traced.
RandomWork = toy("random-work", update="cube(grad + torch.randn_like(grad))")()


class RandomByItself(HostReading):
    """By a generator that it made."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)
        self.generator = torch.Generator().manual_seed(0)

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        super().update(param, grad + torch.rand((), generator=self.generator), group, state)


def wrapped(kind: type[Optimizer], **options: Any) -> tuple[Any, nn.Parameter]:
    param = nn.Parameter(torch.ones(6, 4))
    param.grad = torch.ones(6, 4)
    return canzona_compile.wrap(kind([param], lr=0.1), **options), param  # type: ignore[call-arg]


@pytest.mark.parametrize("kind", [RandomState, RandomWork])
def test_it_works_and_says_so_once(kind: type[Optimizer]) -> None:
    optimizer, param = wrapped(kind)
    with pytest.warns(
        UserWarning, match=f"{kind.__name__} draws random numbers \\(first for group0.param0\\)"
    ) as found:
        optimizer.step()
    for _ in range(2):  # where warnings are errors, a second one would be seen
        before = param.detach().clone()
        optimizer.step()
        assert not torch.equal(before, param)
    assert len(found) == 1
    reasons = optimizer.canzona.report().fallbacks
    assert reasons == ({} if kind is RandomState else {"group0.param0": reasons["group0.param0"]})
    assert all("draws random numbers" in reason for reason in reasons.values())


# Draws, and keeps an object in its state: none of its steps can be recorded.
RandomTally = toy(
    "random-tally", update="cube(grad + torch.randn_like(grad))", then='state.setdefault("tally", object())'
)()


def test_what_is_refused_once_is_refused_again() -> None:
    """Nothing of the first try may look like a kind that is known to be independent."""
    param = nn.Parameter(torch.ones(6, 4))
    optimizer = canzona_compile.wrap(RandomTally([param], 0.1))
    param.grad = torch.ones(6, 4)
    for _ in range(2):
        with pytest.raises(UnsupportedOptimizer, match="draws random numbers in code that cannot be traced") as caught:
            optimizer.step()
        assert "one_per_matrix=lambda params: RandomTally(params, lr=0.1)" in str(caught.value)
    assert torch.equal(param, torch.ones(6, 4))


def test_generators_of_an_optimizer_are_refused() -> None:
    params = [nn.Parameter(torch.ones(6, 4)) for _ in range(2)]  # one after the other draws from it
    optimizer = canzona_compile.wrap(RandomByItself(params))
    for param in params:
        param.grad = torch.ones(6, 4)
    with pytest.raises(UnsupportedOptimizer, match="draws random numbers from one generator"):
        optimizer.step()
    assert all(torch.equal(param, torch.ones(6, 4)) for param in params)


@pytest.mark.parametrize("kind", [Muon, HostReading])
def test_planning_leaves_the_generator_alone(kind: type[Optimizer]) -> None:
    optimizer, _ = wrapped(kind)
    before = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
    assert torch.equal(before, torch.get_rng_state())


def train(kind: str, strategy: Any) -> tuple[list[Tensor], str]:
    random = torch.Generator().manual_seed(0)
    values = [torch.randn(6, 4, generator=random) for _ in range(3)]
    torch.manual_seed(torch.distributed.get_rank())
    laid = Laid(values, Case("fsdp", (2,)))
    optimizer = globals()[kind](laid.params)
    canzona_compile.wrap(optimizer, strategy=strategy)
    try:
        for _ in range(2):
            for i, param in enumerate(laid.params):
                param.grad = laid.like_param(values[i], i)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                optimizer.step()
    except CanzonaError as error:
        return [full(p) for p in laid.params], str(error)
    return [full(p) for p in laid.params], ""


@pytest.mark.parametrize("kind", first(["RandomState", "RandomWork"]))
def test_one_rank_draws_for_all(kind: str) -> None:
    """Generators differ between ranks: what each would compute for itself would not fit together."""
    for strategy in ("owner", "auto"):  # which would choose every rank for matrices that small
        (one, said), (other, _) = run(2, train, kind, strategy)
        assert said == ""
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    for _, said in run(2, train, kind, "replicated"):
        assert "every rank computes this matrix, so their copies would differ" in said
        assert 'wrap with strategy="owner"' in said
