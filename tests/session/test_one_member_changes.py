"""The elementwise member of a chain, or an AdamW alone, changes on one rank: an error on all ranks, or no need of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Muon, Optimizer

import canzona_compile
from canzona_compile import CanzonaError, chain
from canzona_compile.runtime import channel
from examples.optimizers.soap import SOAP
from tests.harness.layouts import Case, local
from tests.harness.pairs import Pair, params_of
from tests.harness.ranks import PATIENCE, run

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


EDITS = (of_another_dtype, sparse, other_memory, grown, loaded, amsgrad)


def parts(optimizer: Any) -> list[Tensor]:
    states = [value for own in optimizer.state.values() for value in own.values() if isinstance(value, Tensor)]
    return [local(value).clone() for value in (*params_of(optimizer), *states)]


def changed_on_one_rank(edit: Edit, case: Case, measured: bool) -> tuple[str, bool]:
    pair = Pair(muon_adamw, SHAPES, case=case)
    pair.steps(3)
    if measured:
        pair.wrapped.canzona.measure(3)
    pair.feed()
    if dist.get_rank() == 1:
        edit(pair.wrapped.optimizers[1])
    before = parts(pair.wrapped)
    try:
        pair.wrapped.step()
    except CanzonaError as error:
        return f"{error}", all(map(torch.equal, before, parts(pair.wrapped)))
    return "", False


@pytest.mark.ranks
@pytest.mark.parametrize("measured", [False, True])
@pytest.mark.parametrize("edit", EDITS)
def test_a_member_that_changes_on_one_rank_stops_all_of_them(edit: Edit, measured: bool) -> None:
    case = Case("fsdp" if edit is not sparse else "ddp", (2,))
    for said, unchanged in run(2, changed_on_one_rank, edit, case, measured, fresh=True, limit=PATIENCE / 2):
        assert said
        assert unchanged
