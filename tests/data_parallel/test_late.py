"""ZeRO-1: a late rank is waited for, and what one rank does otherwise is known to all ranks that would wait."""

from __future__ import annotations

import time
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim import SGD

import canzona_compile
from canzona_compile.runtime import meeting, waiter
from tests.data_parallel.models import CHEAP, Model, batch
from tests.data_parallel.runs import set_up, step_alone
from tests.harness.mistakes import attempt
from tests.harness.model_pairs import train, under_zero1, update
from tests.harness.ranks import run


def late_for_a_step() -> list[str]:
    """Rank 1 is late between two optimizers, then the user communicates; what differs from plain optimizers."""
    waiter.PATIENCE = timedelta(seconds=0.1)
    pair = under_zero1(Model(), CHEAP["sgd"], gather="forward", bucket_bytes=40_000)
    for step in range(3):
        pair.both_backward(step)
        pair.optimizers[0].step()
        if dist.get_rank() == 1:
            time.sleep(0.5)
        pair.optimizers[1].step()
        dist.all_reduce(torch.ones(1000))
        for optimizer in pair.optimizers:
            optimizer.zero_grad()
        update(pair.expected)
    return pair.different()


def reads_alone_before_a_flush() -> str:
    """Rank 0 reads parameters while an optimizer that shares their bucket has not stepped."""
    model, optimizers, _ = set_up(gather="forward", bucket_bytes=4_000_000)
    model(batch(0, dist.get_rank())).backward()
    optimizers[0].step()
    with mock.patch.object(meeting, "PATIENCE", timedelta(seconds=1)):
        said = attempt(model.state_dict).said if dist.get_rank() == 0 else ""
    dist.barrier()
    return said


def raises_alike() -> list[str]:
    """All ranks raise where a gradient is read, rank 1 late, and train on; and again, and bind another model."""
    waiter.PATIENCE = timedelta(seconds=0.1)
    found = []
    model, optimizers, _ = set_up()
    for step in range(3):
        model(batch(step, dist.get_rank())).backward()
        for weight in list(model.parameters())[:3]:
            found.append(attempt(lambda: weight.grad.norm()).said)  # noqa: B023
            if dist.get_rank() == 1 and step == 1:
                time.sleep(0.3)
        update(optimizers)
    model(batch(3, dist.get_rank())).backward()
    found.append(attempt(lambda: next(model.parameters()).grad.norm()).said)
    dist.barrier()
    other, others, _ = set_up()
    train(other, others)
    return found


def begins_anew() -> tuple[str, str]:
    """Backward fails on rank 1, and then another model is to be trained on the same ranks."""
    model, optimizers, _ = set_up()
    train(model, optimizers)

    def fail(_: Any) -> None:
        raise MemoryError("none left")

    if dist.get_rank() == 1:
        next(model.parameters()).register_hook(fail)
    said = attempt(lambda: model(batch(1, dist.get_rank())).backward()).said
    fresh = nn.Linear(4, 4)
    return said, attempt(
        lambda: canzona_compile.zero1(fresh, SGD(fresh.parameters(), lr=0.1), mesh=dist.group.WORLD)
    ).said


def one_column_differs() -> list[str]:
    """Two data-parallel ranks of four clip by unequal norms; what each step said. Others share matrices with them."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    optimizer: Any = canzona_compile.zero1(model, SGD(model.parameters(), lr=0.1), mesh=mesh["dp"])
    found = []
    for step in range(3):
        model(torch.ones(2, 8)).sum().backward()
        largest = 0.3 if step == 1 and dist.get_rank() == 0 else 0.1
        said = attempt(lambda: optimizer.canzona.clip_grad_norm_(largest)).said  # noqa: B023
        if not said:
            optimizer.step()
        optimizer.zero_grad()
        found.append(said)
    return found


AFTER = partial(step_alone)


def test_a_rank_that_is_late_for_a_step() -> None:
    """No rank begins to gather because it has waited: the late one goes on to another collective."""
    assert run(2, late_for_a_step, fresh=True, after=AFTER) == [[], []]


def test_one_rank_reads_parameters_before_all_optimizers_have_stepped() -> None:
    said, nothing = run(2, reads_alone_before_a_flush, fresh=True, after=AFTER)
    assert "rank 1 did not make this call" in said
    assert nothing == ""


def test_ranks_that_all_raise_the_same_go_on() -> None:
    """None of them hears what another one raised at the same place, however late that one is."""
    for said in run(2, raises_alike, fresh=True, after=AFTER):
        assert len(said) == 10
        assert all("its norm would differ" in one for one in said), said


def test_nothing_is_bound_on_ranks_whose_collectives_never_complete() -> None:
    for said, later in run(2, begins_anew, fresh=True, after=AFTER):
        assert said
        assert "interrupted a backward pass" in later


def test_ranks_of_tensor_parallelism_hear_what_differs_in_another_column() -> None:
    for first, second, third in run(4, one_column_differs, fresh=True):
        assert (first, third) == ("", "")
        assert "different arguments" in second
