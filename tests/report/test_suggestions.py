"""What a report suggests to share, and that sharing it does what the report says."""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

import canzona_compile
from canzona_compile.report.units import format_flops
from tests.harness.layouts import mesh_of
from tests.harness.optimizers import share_captures
from tests.harness.pairs import Pair
from tests.harness.ranks import run

Sizes = dict[str, int]
EVEN = {"q": 32, "k": 32, "v": 32, "o": 32}  # tensor parallelism cuts o alone
ONE_LARGE = {"q": 64, "o": 32}


def reported(sizes: Sizes, share: bool) -> tuple[tuple[str, ...], int]:
    """FSDP2 on tensor parallelism that does not cut q, k and v: what the report suggests, and its largest load."""
    mesh: Any = mesh_of((2, 2), ("dp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(OrderedDict((name, nn.Linear(size, size, bias=False)) for name, size in sizes.items()))
    parallelize_module(model, mesh["tp"], {"o": RowwiseParallel()}, src_data_rank=None)
    fully_shard(model, mesh=mesh["dp"])
    optimizer: Any = torch.optim.Muon(model.parameters(), lr=0.1)
    optimizer = canzona_compile.wrap(optimizer, strategy="owner", replicate=mesh["tp"] if share else None)
    share_captures(optimizer)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    report = optimizer.canzona.report()
    return report.suggestions, max(load.flops for load in report.loads)


def step_alone(size: int) -> None:
    """What ranks would capture, each by itself."""
    Pair(shapes=[(size, size)]).step()


def test_what_tensor_parallelism_does_not_cut_can_be_shared() -> None:
    alone = partial(step_alone, EVEN["q"])
    found, shared = (run(4, reported, EVEN, share, after=alone) for share in (False, True))
    now, then = max(load for _, load in found), max(load for _, load in shared)
    assert then < now
    for (said,), _ in found:
        assert said.startswith("3 matrices lie on no mesh dim 'tp'")
        assert "wrap(..., replicate=mesh['tp']) shares it" in said
        assert said.endswith(f"the busiest rank computes {format_flops(then)} then instead of {format_flops(now)}.")
    assert {said for said, _ in shared} == {()}


@pytest.mark.full
def test_what_would_not_lower_the_largest_load_is_not_suggested() -> None:
    assert {said for said, _ in run(4, reported, ONE_LARGE, False)} == {()}


def plain(replicas: bool) -> tuple[str, ...]:
    params = [nn.Parameter(torch.ones(8, 6)) for _ in range(3)]
    group = torch.distributed.group.WORLD if replicas else None
    optimizer: Any = canzona_compile.wrap(torch.optim.Muon(params, lr=0.1), replicate=group)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    suggested: tuple[str, ...] = optimizer.canzona.report().suggestions
    return suggested


@pytest.mark.full
def test_plain_tensors_can_be_shared() -> None:
    for (said,) in run(2, plain, False):
        assert said.startswith("3 matrices are plain tensors, computed on their rank alone.")
    assert run(2, plain, True) == [(), ()]
