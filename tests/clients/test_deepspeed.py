"""DeepSpeed's engine with wrapped optimizers, by the package itself."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import canzona_compile
from canzona_compile.errors import CanzonaError
from tests.docs.scripts import path_of, ran
from tests.harness.ranks import run

deepspeed: Any = pytest.importorskip("deepspeed", reason="the package deepspeed is not installed")


def test_the_engine_steps_matrices_at_stage_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    found = ran(path_of("deepspeed_engine"), 2)
    assert [one.differing for one in found] == [[], []]
    assert {how.by for how in found[0].trained.values()} == {"Muon", "AdamW"}
    assert all(one.compared and how.changed for one in found for how in one.trained.values())
    assert len(set(map(str, (one.trained for one in found)))) == 1
    losses = re.findall(r"loss ([\d.]+)", found[0].said)
    assert float(losses[-1]) < float(losses[0])


def refused(stage: int) -> str:
    """What a step says at a stage that gives the optimizer flat shards."""
    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    model = nn.Sequential(*[nn.Linear(32, 32, bias=False) for _ in range(2)])
    optimizer = canzona_compile.muon_adamw(model, lr=1e-2, replicate=dist.group.WORLD)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    try:
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        engine.backward(engine(torch.ones(4, 32)).square().mean())
        engine.step()
    except CanzonaError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_flat_shards_are_refused(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    for said in run(2, refused, stage, fresh=True):
        assert "DeepSpeed has given the optimizer a flat shard of a partition" in said
        assert 'ZeRO stage 0 ({"zero_optimization": {"stage": 0}})' in said
