"""The elementwise member of a chain, or an AdamW alone, changes on one rank: all ranks raise, or none is needed."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Muon, Optimizer

from canzona_compile import CanzonaError, chain
from canzona_compile.runtime import channel
from tests.harness.layouts import Case, local
from tests.harness.pairs import Pair, params_of
from tests.harness.ranks import run

SHAPES = ((12, 8), (8, 12), (20, 8), (5, 3))
Edit = Callable[[Optimizer], None]


def muon_adamw(params: list[Any]) -> Any:
    return chain(Muon(params[:2], lr=0.1), AdamW(params[2:], lr=0.01))


def adamw(params: list[Any]) -> Any:
    return AdamW(params, lr=0.01)


def of_another_dtype(optimizer: Optimizer) -> None:
    param = params_of(optimizer)[0]
    param.grad, param.grad_dtype = None, torch.float64
    param.grad = torch.zeros_like(param, dtype=torch.float64)


def sparse(optimizer: Optimizer) -> None:
    param = params_of(optimizer)[0]
    param.grad = (local(param) * 0).to_sparse()


def other_memory(optimizer: Optimizer) -> None:
    param = params_of(optimizer)[0]
    part = param._local_tensor if isinstance(param, DTensor) else param
    part.data = part.detach().clone()


def grown(optimizer: Optimizer) -> None:
    optimizer.state[params_of(optimizer)[0]]["mine"] = torch.zeros(3)


def loaded(optimizer: Optimizer) -> None:
    optimizer.load_state_dict(optimizer.state_dict())


def amsgrad(optimizer: Optimizer) -> None:
    for group, param in zip(optimizer.param_groups, params_of(optimizer), strict=False):
        group["amsgrad"] = True
        optimizer.state[param]["max_exp_avg_sq"] = torch.zeros_like(param)


EDITS = (of_another_dtype, other_memory, loaded, amsgrad)  # another entry in the state of AdamW is never read


def parts(optimizer: Any) -> list[Tensor]:
    states = [value for own in optimizer.state.values() for value in own.values() if isinstance(value, Tensor)]
    return [local(value).clone() for value in (*params_of(optimizer), *states)]


def alone() -> None:
    Pair(muon_adamw, SHAPES, case=Case("plain", ())).steps(2)


def changed_on_one_rank(case: Case, edits: Sequence[Edit], measured: bool) -> list[str]:
    """What went wrong: a rank that raised nothing or updated something; in the next step all go on."""
    wrong = []
    for edit in edits:
        pair = Pair(muon_adamw, SHAPES, case=case)
        pair.steps(2)
        if measured:
            pair.wrapped.canzona.measure(3)
        pair.feed()
        if dist.get_rank() == 1:
            edit(pair.wrapped.optimizers[1])
        before = parts(pair.wrapped)
        with contextlib.suppress(CanzonaError):
            pair.wrapped.step()
            wrong.append(f"{edit.__name__}: no error")
        if not all(map(torch.equal, before, parts(pair.wrapped))):
            wrong.append(f"{edit.__name__}: updated")
        if edit in (other_memory, loaded):
            pair.steps(2)
    return wrong


@pytest.mark.parametrize(
    ("layout", "edits", "measured"),
    [("fsdp", EDITS, False), ("ddp", (sparse,), False), ("fsdp", (other_memory,), True)],
    ids=["fsdp", "ddp", "measured"],
)
def test_a_member_that_changes_on_one_rank_stops_all(layout: str, edits: Sequence[Edit], measured: bool) -> None:
    found = run(2, changed_on_one_rank, Case(layout, (2,)), edits, measured, after=functools.partial(alone))
    assert found == [[], []]


def announcements() -> int:
    """Those of a step of two optimizers whose matrices all ranks share, and a third one."""

    def three(p: list[Any]) -> Any:
        return chain(Muon(p[:1], lr=0.1), Muon(p[1:2], lr=0.2), AdamW(p[2:], lr=0.01))

    pair = Pair(three, SHAPES, case=Case("fsdp", (2,)))
    pair.steps(2)
    before = sum(own.announced for own in channel._living)
    pair.steps(1)
    return sum(own.announced for own in channel._living) - before


def test_a_chain_announces_once_per_step() -> None:
    assert run(2, announcements, after=functools.partial(alone)) == [1, 1]


def alone_on_one_rank(case: Case, edits: Sequence[Edit]) -> None:
    """An optimizer that shares no tasks plans again on one rank, or that rank alone raises; all go on."""
    for edit in edits:
        pair = Pair(adamw, SHAPES, case=case)
        pair.steps(2)
        for own in (pair.plain, pair.wrapped) if dist.get_rank() == 1 else ():
            edit(own)
        pair.steps(2)


@pytest.mark.parametrize("layout", ["fsdp", "ddp"])
def test_an_optimizer_that_shares_no_tasks_plans_without_other_ranks(layout: str) -> None:
    run(2, alone_on_one_rank, Case(layout, (2,)), (other_memory, grown, loaded))
