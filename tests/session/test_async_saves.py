"""Saving in a thread on the default process group, while ranks step: our agreement has a group of its own."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from tests.harness.layouts import Case
from tests.harness.ranks import run
from tests.harness.trainer import Trainer, ready

STEPS, SAVES = 100, 10


@contextlib.contextmanager
def data_elsewhere() -> Iterator[None]:
    """As on devices: there the data of the default group goes through NCCL, and gloo is for the host alone.

    The only data of such a step is the one element with which ranks wait for one another; before the first one, the
    all-to-all that connects them.
    """
    own, plain, exchange = dist.new_group(backend="gloo"), dist.all_reduce, dist.all_to_all_single

    def all_reduce(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.is_floating_point() and threading.current_thread() is threading.main_thread():
            kwargs["group"] = own
        return plain(tensor, *args, **kwargs)

    def all_to_all(*args: Any, **kwargs: Any) -> Any:
        return exchange(*args, **{**kwargs, "group": own})

    with mock.patch.multiple(dist, all_reduce=all_reduce, all_to_all_single=all_to_all):
        yield


def saves_meanwhile(folder: str) -> int:
    """Steps in which every rank computes everything, so that nothing but the agreement communicates.

    Returns:
        The process groups that steps have added.
    """
    trainer = Trainer(Case("ddp", (dist.get_world_size(),)), strategy="replicated")
    saving: Any = None
    groups = 0
    with data_elsewhere():
        for step in range(STEPS):
            if step % (STEPS // SAVES) == 0:
                if saving is not None:
                    saving.result()
                saving = dcp.async_save({"weights": torch.ones(1000)}, checkpoint_id=f"{folder}/{step}")
            trainer.go(1)
            groups = groups or len(dist.distributed_c10d._world.pg_map)
        saving.result()
    more = len(dist.distributed_c10d._world.pg_map) - groups
    trainer.check()
    return more


@pytest.mark.filterwarnings("ignore")
def test_saves_on_the_default_group(tmp_path: Any) -> None:
    assert run(2, saves_meanwhile, str(tmp_path), fresh=True, after=ready()) == [0, 0]
