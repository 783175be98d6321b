"""Copies of a wrapped optimizer on ranks go on as the original does, wherever the state was kept."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

import canzona_compile
from tests.harness.layouts import Case, full
from tests.harness.marks import first
from tests.harness.optimizers import share_captures
from tests.harness.pairs import params_of, same_bits
from tests.harness.ranks import run
from tests.harness.trainer import NAMES, Trainer


def copied(optimizer: Any, how: str, layout: str) -> Any:
    if how == "deepcopy":
        return copy.deepcopy(optimizer)
    twin = pickle.loads(pickle.dumps(optimizer))
    if layout == "ddp":  # process groups are not in a pickle
        canzona_compile.wrap(twin, replicate=dist.group.WORLD, strategy="owner")
    return twin


def copy_on_ranks(layout: str, how: str) -> tuple[list[bool], int]:
    """Plain Muon, the original and a copy that was made in mid-training, with equal gradients."""
    trainer = Trainer(Case(layout, (dist.get_world_size(),)), strategy="owner")
    alone = [torch.nn.Parameter(full(p).clone()) for p in trainer.params]
    plain = torch.optim.Muon(alone, lr=2e-2)
    twin, same = None, []
    for number in range(5):
        if number == 2:
            twin = copied(trainer.optimizer, how, layout)
            share_captures(twin)
        for own, whole in zip(alone, trainer.gradients(), strict=True):
            own.grad = whole
        for own, original in zip(params_of(twin) if twin else [], trainer.params, strict=bool(twin)):
            assert original.grad is not None
            own.grad = original.grad.clone()
        for optimizer in (plain, twin, trainer.optimizer):
            if optimizer is not None:
                optimizer.step()
        for params in (trainer.params, params_of(twin) if twin else []):
            same += [same_bits(x, full(y)) for x, y in zip(alone, params, strict=False)]
    assert twin is not None
    return same, len(twin.canzona.report().tasks)


def step_alone() -> None:
    """What ranks would capture, each by itself."""
    trainer = Trainer(Case("plain", ()))
    for _ in range(2):
        trainer.gradients()
        trainer.optimizer.step()


@pytest.mark.ranks
@pytest.mark.parametrize("how", first(["deepcopy", "pickle"]))
@pytest.mark.parametrize("layout", first(["fsdp", "ddp"]))
def test_a_copy_on_ranks(layout: str, how: str) -> None:
    """State on fragments (FSDP2) and on owners (DDP); copying is a collective there."""
    comparisons = len(NAMES) * (5 + 3)  # the original on five steps, the copy on three
    outcomes = run(2, copy_on_ranks, layout, how, after=partial(step_alone))
    assert outcomes == [([True] * comparisons, len(NAMES))] * 2
