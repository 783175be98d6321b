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
from canzona_compile.ir.program import View, Views
from canzona_compile.ir.program_ops import MATRIX_ALIGNMENT
from canzona_compile.optimizers.shampoo import Shampoo
from canzona_compile.runtime.buffers import SharedSlots
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
    assert optimizer.canzona.report().memory.buffers == sum(programs.buffer_sizes)
    return sum(programs.buffer_sizes), own


@pytest.mark.full
def test_variants_take_the_memory_of_the_largest() -> None:
    for found, own in run(2, variants):
        assert len(own) >= 2
        assert min(own) > 0
        assert found < sum(own)
        assert found >= max(own)


@given(st.integers(1, 4), st.sampled_from([(5, 7), (3,), ()]), st.integers(0, 3))
def test_entries_of_a_stack_with_gaps(n: int, shape: tuple[int, ...], before: int) -> None:
    """The stack and its entries, taken one by one, are the same memory."""
    pitch = 3 * MATRIX_ALIGNMENT
    stack = View(0, before * MATRIX_ALIGNMENT, torch.float32, (n, *shape), pitch=pitch)
    slots = [torch.zeros(stack.offset + stack.nbytes, dtype=torch.uint8)]
    whole = stack.of(slots)
    for i, entry in enumerate(stack.rows()):
        entry.of(slots).fill_(i + 1)
        assert (entry.offset - stack.offset) == i * pitch
    assert whole.shape == (n, *shape)
    assert torch.equal(whole, torch.arange(1.0, n + 1).view(n, *[1] * len(shape)).expand_as(whole))


def addresses() -> set[int]:
    """Where whole matrices of odd sizes begin, in bytes of their buffers."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    params = [torch.nn.Parameter(distribute_tensor(torch.ones(5, 7), mesh, [Shard(0)])) for _ in range(5)]
    optimizer: Any = canzona_compile.wrap(Shampoo(params, lr=0.01, every=3), strategy="owner")
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.step()
    programs = [program.executor.program for program in optimizer.canzona.session.driver.programs]
    lists = [v for p in programs for name, v in p.inputs.items() if name.endswith("_list") and isinstance(v, Views)]
    return {view.offset for own in lists for view in own.views}


def test_whole_matrices_are_aligned_as_matrices_of_their_own() -> None:
    """Libraries round products by the alignment of operands, so others than the plain optimizer's would differ."""
    found = run(2, addresses)
    assert max(map(len, found)) > 1
    assert {offset % MATRIX_ALIGNMENT for own in found for offset in own} == {0}
