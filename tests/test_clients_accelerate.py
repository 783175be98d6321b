"""Accelerate's `prepare`, in one process and with FSDP2, beside the same loop with the plain optimizer."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Muon

import canzona_compile
from tests.layouts import full
from tests.ranks import run

accelerate = pytest.importorskip("accelerate")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # of Accelerate itself

STEPS = 8
FAR = 1e6  # is not reached: a norm is rounded otherwise where shards are summed


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 16, bias=False), nn.SiLU(), nn.Linear(16, 10, bias=False))


def batch(step: int) -> Tensor:
    """Equal on all ranks, so that gradients averaged over two of them are those of one."""
    return torch.randn(4, 12, generator=torch.Generator().manual_seed(step))


def train(when: str, clip: float, sharded: bool = False) -> tuple[list[Tensor], Any]:
    """A loop as Accelerate's users write it; the optimizer is wrapped "before" or "after" `prepare`, or not."""
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    if sharded:  # Accelerate itself turns to FSDP on accelerators only
        accelerator.state.distributed_type = accelerate.DistributedType.FSDP
        accelerator.state.fsdp_plugin = accelerate.FullyShardedDataParallelPlugin(fsdp_version=2)
    model = model_of()
    optimizer = Muon(model.parameters(), lr=0.1)
    if when == "before":
        canzona_compile.wrap(optimizer, strategy="owner")
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4 if sharded else 2, 0.5)  # Accelerate steps it per rank
    model, prepared, schedule = accelerator.prepare(model, optimizer, schedule)
    if when == "after":
        canzona_compile.wrap(prepared.optimizer, strategy="owner")
    for step in range(STEPS):
        with accelerator.accumulate(model):
            accelerator.backward(model(batch(step)).square().sum())
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), clip)
            prepared.step()
            schedule.step()
            prepared.zero_grad()
    return [full(p).clone() for p in model.parameters()], prepared.optimizer


@pytest.mark.parametrize("when", ["before", "after"])
def test_in_one_process(when: str) -> None:
    expected, _ = train("plain", 0.5)
    found, optimizer = train(when, 0.5)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert len(optimizer.canzona.report().tasks) == 2


def train_sharded(when: str) -> tuple[list[Tensor], int, list[str]]:
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    found, optimizer = train(when, FAR, sharded=True)
    report = optimizer.canzona.report()
    return found, report.world_size, [task.strategy for task in report.tasks]


@pytest.mark.ranks
@pytest.mark.parametrize("when", ["before", "after"])
def test_with_fsdp2(when: str) -> None:
    """`prepare` shards the model and puts other parameters in the optimizer, which was built before."""
    expected, _ = train("plain", FAR)
    for found, world, strategies in run(2, train_sharded, when, fresh=True):
        assert (world, strategies) == (2, ["owner", "owner"])
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
