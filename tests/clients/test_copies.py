"""Copies of a wrapped optimizer on ranks go on as the original does, wherever the state was kept."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch.distributed as dist

import canzona_compile
from tests.harness.layouts import Case
from tests.harness.marks import first
from tests.harness.optimizers import share_captures
from tests.harness.pairs import different, params_of
from tests.harness.ranks import run
from tests.harness.trainer import NAMES, Trainer, ready


def copied(optimizer: Any, how: str, layout: str) -> Any:
    if how == "deepcopy":
        return copy.deepcopy(optimizer)
    twin = pickle.loads(pickle.dumps(optimizer))
    if layout == "ddp":  # process groups are not in a pickle
        canzona_compile.wrap(twin, replicate=dist.group.WORLD, strategy="owner")
    return twin


def copy_on_ranks(layout: str, how: str) -> int:
    """Plain Muon, the original and a copy that was made in mid-training, with equal gradients."""
    trainer = Trainer(Case(layout, (dist.get_world_size(),)), strategy="owner")
    trainer.go(2)
    twin = copied(trainer.optimizer, how, layout)
    share_captures(twin)
    for _ in range(3):
        trainer.feed()
        for own, original in zip(params_of(twin), trainer.params, strict=True):
            assert original.grad is not None
            own.grad = original.grad.clone()
        trainer.take()
        twin.step()
        assert different(trainer.plain, twin, states=False) == []
        trainer.check()
    return len(twin.canzona.report().tasks)


@pytest.mark.parametrize("how", first(["deepcopy", "pickle"]))
@pytest.mark.parametrize("layout", first(["fsdp", "ddp"]))
def test_a_copy_on_ranks(layout: str, how: str) -> None:
    """State on fragments (FSDP2) and on owners (DDP); copying is a collective there."""
    assert run(2, copy_on_ranks, layout, how, after=ready()) == [len(NAMES)] * 2
