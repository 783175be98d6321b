"""`torch.compile` around a whole train step: Dynamo breaks its graph at the optimizer, as it does at a plain one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import canzona_compile
from tests.harness.marks import full
from tests.harness.ranks import run
from tests.harness.toys import DecoratedMuon

pytestmark = pytest.mark.filterwarnings("ignore")  # those of Dynamo about plain train steps
KINDS: dict[str, Callable[[Any], Optimizer]] = {
    "traced": lambda params: torch.optim.Muon(params, lr=0.02),
    "dispatched": lambda params: DecoratedMuon(params),
    "elementwise": lambda params: torch.optim.AdamW(params, lr=0.02),
    "chain": lambda params: canzona_compile.chain(
        torch.optim.Muon([next(params)], lr=0.02), torch.optim.AdamW([next(params)], lr=0.02)
    ),
}


def tiny() -> nn.Sequential:
    """Of one shape, that little has to be captured."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6, bias=False), nn.Tanh(), nn.Linear(6, 6, bias=False))


def train(model: nn.Module, optimizer: Optimizer, compiled: bool, rank: int = 0, ranks: int = 1) -> list[Tensor]:
    """Four train steps with a scheduler, and what the parameters are after them."""
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)

    def train_step(batch: Tensor) -> Tensor:
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        return loss.detach()

    step = torch.compile(train_step, backend="eager") if compiled else train_step
    data = torch.Generator().manual_seed(1)
    for _ in range(4):
        step(torch.randn(4 * ranks, 6, generator=data).chunk(ranks)[rank])
    return [value(param).clone() for param in model.parameters()]


def value(param: Tensor) -> Tensor:
    return param.full_tensor() if isinstance(param, DTensor) else param.detach()


@pytest.mark.parametrize("kind", [full(kind) if kind == "chain" else kind for kind in KINDS])
def test_one_process(kind: str) -> None:
    torch.compiler.reset()
    found = []
    for wrapped in (False, True):
        model = tiny()
        optimizer = KINDS[kind](model.parameters())
        if wrapped:
            canzona_compile.wrap(optimizer)
        found.append(train(model, optimizer, compiled=wrapped))
    assert all(map(torch.equal, *found))


def test_calls_beside_the_step_are_not_traced_either() -> None:
    torch.compiler.reset()
    model = tiny()
    optimizer: Any = canzona_compile.wrap(torch.optim.Muon(model.parameters(), lr=0.02))

    def train_step(batch: Tensor) -> tuple[Any, str]:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.load_state_dict(optimizer.state_dict())
        return optimizer.state_dict(), str(optimizer.canzona.explain())

    saved, told = torch.compile(train_step, backend="eager")(torch.ones(2, 6))
    assert sorted(saved["state"]) == [0, 1]
    assert told == str(optimizer.canzona.explain())


def train_on_ranks(layout: str) -> bool:
    """Whether wrapped bits under `torch.compile` are plain bits without it."""
    torch.compiler.reset()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    found = []
    for wrapped in (False, True):
        model: Any = tiny()
        shown = DistributedDataParallel(model) if layout == "ddp" or not wrapped else model
        if layout == "fsdp2" and wrapped:
            fully_shard(model, mesh=mesh)
        optimizer = torch.optim.Muon(model.parameters(), lr=0.02)
        if wrapped and layout == "zero1":
            canzona_compile.zero1(model, optimizer, mesh=mesh)
        elif wrapped:
            canzona_compile.wrap(optimizer, replicate=mesh if layout == "ddp" else None)
        found.append(train(shown, optimizer, wrapped, rank, ranks))
    return all(map(torch.equal, *found))


@pytest.mark.parametrize("layout", [full("ddp"), "fsdp2", full("zero1")])
def test_ranks(layout: str) -> None:
    assert run(2, train_on_ranks, layout) == [True, True]
