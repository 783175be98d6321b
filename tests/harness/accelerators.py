"""Accelerators of Accelerate for a test: on the CPU, also with FSDP2, and gone afterwards."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

accelerate = pytest.importorskip("accelerate")


@contextlib.contextmanager
def accelerator(**options: Any) -> Iterator[Any]:
    """An Accelerator on the CPU. It keeps what it is in the process and in the environment; none of it stays."""
    from accelerate.state import AcceleratorState, GradientState

    ranks = {}
    if dist.is_initialized():
        rank, world = str(dist.get_rank()), str(dist.get_world_size())
        ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    with mock.patch.dict(os.environ, ranks):
        try:
            yield accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2, **options)
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()


@contextlib.contextmanager
def fsdp2() -> Iterator[Any]:
    """An Accelerator for FSDP2 on gloo ranks; it would take FSDP for plain DDP where there are only CPUs."""
    plugin = accelerate.FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False)
    with accelerator(fsdp_plugin=plugin) as made:
        # Where it looks again, whenever something asks for its state.
        accelerate.PartialState().distributed_type = accelerate.DistributedType.FSDP
        made.state.distributed_type, made.state.fsdp_plugin = accelerate.DistributedType.FSDP, plugin
        yield made
        assert made.is_fsdp2
