"""Periodic work on another step for every matrix, under zero1: the bits of an optimizer that was written that way."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor

from tests.data_parallel.test_checkpoints import gradient
from tests.data_parallel.test_checkpoints import train as train_model
from tests.harness.layouts import full, mesh_of
from tests.harness.model_pairs import zero1
from tests.harness.pairs import capture_alone, params_of, same_bits
from tests.harness.ranks import run
from tests.session.test_stagger import SHAPES, Periodic

STEPS = 10


class Matrices(nn.Module):
    """Some matrices; under tensor parallelism every second one is a fragment."""

    def __init__(self, tp: Any = None) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(3)
        values: list[Tensor] = [torch.randn(shape, generator=random) for shape in SHAPES]
        if tp is not None:
            values = [distribute_tensor(v, tp, [Shard(0)]) if i % 2 else v for i, v in enumerate(values)]
        self.matrices = nn.ParameterList(map(nn.Parameter, values))


def alone() -> None:
    """Capture in one process what ranks need."""
    capture_alone(Periodic(list(Matrices().parameters())))


def train(tensor_parallel: bool) -> list[str]:
    """Train under zero1, and by a plain optimizer that has the offsets of all owners. What differs, by step."""
    world = dist.get_world_size()
    ranks = 2 if tensor_parallel else 1
    mesh = mesh_of((world // ranks, ranks), ("dp", "tp"))
    model = Matrices(mesh["tp"] if tensor_parallel else None)
    found = zero1(model, Periodic(model.parameters()), mesh=mesh["dp"], stagger=True)
    plain = Periodic(list(Matrices().parameters()))
    names = [name for name, _ in model.named_parameters()]
    said: list[str] = []
    for step in range(STEPS):
        train_model(model, found, step)
        for i, param in enumerate(params_of(plain)):
            param.grad = gradient(param.shape, step, i)
        if step == 0:
            everybody: list[Any] = [None] * world
            dist.all_gather_object(everybody, dict(found.canzona.session.driver.plan.stagger.ahead))
            offsets = {name: {own[name] for own in everybody if name in own} for name in names}
            said += [f"{name} is {own} steps ahead" for name, own in offsets.items() if len(own) != 1]
            said += [] if len({min(own) for own in offsets.values()}) > 1 else ["nothing is staggered"]
        else:  # the first step makes the state
            plain.phases = {p: min(offsets[n]) for p, n in zip(params_of(plain), names, strict=True)}
        plain.step()
        pairs = zip(names, model.parameters(), params_of(plain), strict=True)
        said += [f"step {step}: {n}" for n, one, two in pairs if not same_bits(full(one), two.detach())]
    return said


@pytest.mark.full
def test_under_tensor_parallelism_ranks_choose_alike() -> None:
    """What they share must refresh on one step, and their copies of what none of them shares too."""
    assert run(4, train, True, after=partial(alone)) == [[]] * 4


def test_on_data_parallel_ranks() -> None:
    assert run(2, train, False, after=partial(alone)) == [[], []]
