"""Memory for buckets on the CPU: later buckets take over that of earlier ones, so a training asks for none any more."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Sequence
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from canzona_compile.data_parallel.collectives import BucketMemory
from canzona_compile.errors import CanzonaError
from tests.data_parallel.models import batch
from tests.data_parallel.runs import set_up, step_alone
from tests.harness.mistakes import attempt
from tests.harness.model_pairs import train
from tests.harness.ranks import run

CPU = torch.device("cpu")


@settings(deadline=None)
@given(
    st.integers(1, 400),
    st.lists(st.tuples(st.integers(0, 90), st.sampled_from([torch.float32, torch.bfloat16])), max_size=60),
)
def test_no_two_buckets_have_the_same_memory(largest: int, wanted: Sequence[tuple[int, torch.dtype]]) -> None:
    """Two buckets are under way at a time. Of each size there are at most two, of twice the bytes at most."""
    memory = BucketMemory(largest)
    held: list[tuple[torch.Tensor, int]] = []
    sizes: set[int] = set()
    for number, (length, dtype) in enumerate(wanted):
        if len(held) == 2:
            memory.give_back(held.pop(number % 2)[0])
        own = memory.take(length, dtype, CPU)
        assert (own.shape, own.dtype) == ((length,), dtype)
        size = own.untyped_storage().nbytes()
        assert size == 0 or length * dtype.itemsize <= size < 2 * length * dtype.itemsize
        sizes.add(size)
        held.append((own.fill_(number), number))
        assert all(bool((other == value).all()) for other, value in held)
        assert memory.free_bytes <= 2 * sum(sizes)


def memory_of_a_training(gather: str) -> tuple[int, int]:
    """Bytes that buckets have after two iterations, and how often the next two asked for memory."""
    model, optimizers, handle = set_up(gather=gather)
    assert len({bucket.starts[-1] for bucket in handle.zero1.buckets}) > 1
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


@pytest.mark.parametrize("gather", ["step", "forward"])
def test_a_training_asks_for_no_memory_after_two_iterations(gather: str) -> None:
    for held, asked in run(2, memory_of_a_training, gather, after=partial(step_alone)):
        assert held > 0
        assert asked == 0


def hooks_of_modules(gather: str) -> int:
    model, _, _ = set_up(gather=gather)
    return sum(len(module._forward_pre_hooks) for module in model.modules())


def test_modules_have_no_forward_hooks_if_a_step_returns_whole_parameters() -> None:
    assert run(2, hooks_of_modules, "step", after=partial(step_alone)) == [0, 0]
    assert min(run(2, hooks_of_modules, "forward", after=partial(step_alone))) > 0


def after_an_interrupt() -> list[bool]:
    """What a rank hears that saves or copies a model after Ctrl-C in the gather of a step."""
    model, optimizers, handle = set_up(bucket_bytes=8_000)
    assert len(handle.zero1.buckets) > 4
    train(model, optimizers, 1)
    model(batch(1, dist.get_rank())).backward()
    gathering = handle.zero1.gathering
    take, taken = gathering._take, 0

    def interrupted() -> None:
        nonlocal taken
        taken += 1
        if taken == 2 and dist.get_rank() == 0:
            raise KeyboardInterrupt
        take()

    with patch.object(gathering, "_take", interrupted), contextlib.suppress(KeyboardInterrupt, CanzonaError):
        optimizers[0].step()
    return [attempt(call).ours for call in (lambda: copy.deepcopy(model), model.state_dict)]


def test_a_model_that_is_not_whole_after_an_interrupt_is_not_saved() -> None:
    for said in run(2, after_an_interrupt, after=partial(step_alone)):
        assert all(said)
