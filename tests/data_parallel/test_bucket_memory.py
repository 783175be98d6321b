"""Memory for buckets on the CPU: later buckets take over that of earlier ones, so a training asks for none any more."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from canzona_compile.data_parallel.collectives import BucketMemory
from tests.data_parallel.mistakes import set_up, step_alone, train
from tests.harness.ranks import run

CPU = torch.device("cpu")


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 50), st.sampled_from([torch.float32, torch.bfloat16])), max_size=30))
def test_no_two_buckets_have_the_same_memory(wanted: Sequence[tuple[int, torch.dtype]]) -> None:
    memory = BucketMemory()
    held = []
    for number, (length, dtype) in enumerate(wanted):
        if len(held) == 3:
            memory.give_back(held.pop(number % 3)[0])
        own = memory.take(length, dtype, CPU)
        assert (own.shape, own.dtype) == ((length,), dtype)
        held.append((own.fill_(number), number))
        assert all(bool((other == value).all()) for other, value in held)


def test_there_is_never_more_than_buckets_had_at_once() -> None:
    memory = BucketMemory()
    for length in (10, 20, 30, 5):
        memory.give_back(memory.take(length, torch.float32, CPU))
        assert memory.free_bytes <= 120
    one, two = (memory.take(length, torch.float32, CPU) for length in (30, 5))
    memory.give_back(one, two)
    assert memory.take(5, torch.float32, CPU).untyped_storage().nbytes() == 20, "the smallest that is enough"


def memory_of_a_training(gather: str) -> tuple[int, int]:
    """Bytes that buckets have after two iterations, and how often the next two asked for memory."""
    model, optimizers, handle = set_up(gather=gather)
    train(model, optimizers, 2)
    optimizers[0].canzona.synchronize()
    memory = handle.zero1.reduction.memory
    asked = 0
    take = memory.take

    def counted(length: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        nonlocal asked
        before = memory.free_bytes
        own: torch.Tensor = take(length, dtype, device)
        asked += memory.free_bytes + own.untyped_storage().nbytes() != before
        return own

    before = memory.free_bytes
    with patch.object(memory, "take", counted):
        train(model, optimizers, 2)
        optimizers[0].canzona.synchronize()
    assert memory.free_bytes == before
    return before, asked


@pytest.mark.ranks
@pytest.mark.parametrize("gather", ["step", "forward"])
def test_a_training_asks_for_no_memory_after_two_iterations(gather: str) -> None:
    for held, asked in run(2, memory_of_a_training, gather, after=partial(step_alone, "sgd")):
        assert held > 0
        assert asked == 0


def hooks_of_modules(gather: str) -> int:
    model, _, _ = set_up(gather=gather)
    return sum(len(module._forward_pre_hooks) for module in model.modules())


@pytest.mark.ranks
def test_modules_have_no_hooks_if_a_step_returns_whole_parameters() -> None:
    assert run(2, hooks_of_modules, "step", after=partial(step_alone, "sgd")) == [0, 0]
    assert min(run(2, hooks_of_modules, "forward", after=partial(step_alone, "sgd"))) > 0
