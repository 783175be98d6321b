"""Programs of one optimizer never run at the same time, and share their buffers."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import canzona_compile
from canzona_compile.optimizers.shampoo import Shampoo
from canzona_compile.runtime.buffers import SharedSlots
from canzona_compile.runtime.program_memory import blocks
from tests.harness.ranks import run

CPU = torch.device("cpu")


@given(st.lists(st.lists(st.integers(0, 40), max_size=5), min_size=1, max_size=6))
def test_slots_are_as_large_as_the_largest_program_needs(programs: list[list[int]]) -> None:
    memory = SharedSlots()
    for sizes in programs:
        slots = memory.of(sizes, CPU)
        assert [slot.memory.numel() >= size for slot, size in zip(slots, sizes, strict=True)] == [True] * len(sizes)
        assert len(set(slots)) == len(sizes)
        assert {slot.memory.dtype for slot in slots} <= {torch.uint8}
        before = memory.sizes
        memory.of(sizes, CPU)
        assert memory.sizes == before
    ordered = [sorted(sizes, reverse=True) for sizes in programs]
    assert sorted(memory.sizes, reverse=True) == [max(same) for same in zip_longest(*ordered, fillvalue=0)]


def test_a_slot_that_is_too_small_grows() -> None:
    memory = SharedSlots()
    first = memory.of([100, 50, 70], CPU)
    second = memory.of([60, 40, 120], CPU)
    assert second == [first[2], first[1], first[0]]
    assert [slot.memory.numel() for slot in first] == [120, 50, 70]


def variants() -> tuple[int, list[int]]:
    """Bytes of an optimizer's buffers, and those that its programs would take by themselves."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    random = torch.Generator().manual_seed(0)
    params = [
        torch.nn.Parameter(distribute_tensor(torch.randn(32, 24, generator=random), mesh, [Shard(0)])) for _ in range(4)
    ]
    optimizer: Any = canzona_compile.wrap(Shampoo(params, lr=0.01, every=3), strategy="owner")
    for _ in range(7):
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
    programs = optimizer.canzona.session.driver.programs
    own = [sum(program.executor.program.slots) for program in programs]
    assert optimizer.canzona.report().memory.buffers == sum(map(blocks, programs.buffer_sizes))
    return sum(programs.buffer_sizes), own


@pytest.mark.full
@pytest.mark.ranks
def test_variants_take_the_memory_of_the_largest() -> None:
    for found, own in run(2, variants):
        assert len(own) >= 2
        assert min(own) > 0
        assert found < sum(own)
        assert found >= max(own)
