"""Accelerate's `prepare`, in one process and with FSDP2, beside the same loop with the plain optimizer."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Muon

import canzona_compile
from tests.harness.accelerators import accelerator, fsdp2
from tests.harness.layouts import full
from tests.harness.marks import first
from tests.harness.optimizers import share_captures
from tests.harness.ranks import run

STEPS = 8
FAR = 1e6  # is not reached: a norm is rounded otherwise where shards are summed


def model_of() -> nn.Sequential:
    """Of one shape, that little has to be captured."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 12, bias=False), nn.SiLU(), nn.Linear(12, 12, bias=False))


def batch(step: int) -> Tensor:
    """Equal on all ranks, so that gradients averaged over two of them are those of one."""
    return torch.randn(4, 12, generator=torch.Generator().manual_seed(step))


def train(made: Any, when: str, clip: float) -> tuple[list[Tensor], Any]:
    """A loop as Accelerate's users write it; the optimizer is wrapped "before" or "after" `prepare`, or not."""
    model = model_of()
    optimizer = Muon(model.parameters(), lr=0.1)
    if when == "before":
        share_captures(canzona_compile.wrap(optimizer, strategy="owner"))
    # Accelerate steps a schedule once per rank.
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2 * made.num_processes, 0.5)
    model, prepared, schedule = made.prepare(model, optimizer, schedule)
    if when == "after":
        share_captures(canzona_compile.wrap(prepared.optimizer, strategy="owner"))
    for step in range(STEPS):
        with made.accumulate(model):
            made.backward(model(batch(step)).square().sum())
            if made.sync_gradients:
                made.clip_grad_norm_(model.parameters(), clip)
            prepared.step()
            schedule.step()
            prepared.zero_grad()
    return [full(p).clone() for p in model.parameters()], prepared.optimizer


@pytest.mark.parametrize("when", first(["before", "after"]))
def test_in_one_process(when: str) -> None:
    with accelerator() as made:
        expected, _ = train(made, "plain", 0.5)
        found, optimizer = train(made, when, 0.5)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert len(optimizer.canzona.report().tasks) == 2


def train_alone(when: str) -> None:
    with accelerator() as made:
        train(made, when, FAR)


def train_sharded(when: str) -> tuple[list[Tensor], int, list[str]]:
    with fsdp2() as made:
        found, optimizer = train(made, when, FAR)
        report = optimizer.canzona.report()
        return found, report.world_size, [task.strategy for task in report.tasks]


@pytest.mark.ranks
@pytest.mark.parametrize("when", first(["before", "after"]))
def test_with_fsdp2(when: str) -> None:
    """`prepare` shards the model and puts other parameters in the optimizer, which was built before."""
    with accelerator() as made:
        expected, _ = train(made, "plain", FAR)
    for found, world, strategies in run(2, train_sharded, when, after=partial(train_alone, when)):
        assert (world, strategies) == (2, ["owner", "owner"])
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
