"""Several models under zero1 on the same ranks: their collectives never meet one another's."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD

import canzona_compile
from tests.harness.layouts import mesh_of
from tests.harness.marks import crossed
from tests.harness.mistakes import attempt
from tests.harness.ranks import run


class Net(nn.Module):
    """Layers of which the middle one may take no part."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(24, 24, bias=False) for _ in range(4))

    def forward(self, x: Tensor, without: int = -1) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = x if i == without else torch.tanh(layer(x))
        return x


def inputs(step: int, rank: int) -> Tensor:
    return torch.randn(4, 24, generator=torch.Generator().manual_seed(100 * step + rank))


class Pair:
    """Two models, and the same ones with plain optimizers."""

    def __init__(self, own_groups: bool, gather: str = "step") -> None:
        world = dist.get_world_size()
        meshes = [mesh_of((world,), ("dp",)), mesh_of((world,), ("dp",))]
        if own_groups:
            groups: list[Any] = [dist.new_group(backend="gloo") for _ in range(2)]
        else:
            groups = list(meshes)
        self.models, self.plain = [Net(0), Net(1)], [Net(0), Net(1)]
        self.optimizers = [
            canzona_compile.zero1(m, SGD(m.parameters(), lr=0.5), mesh=g, bucket_bytes=2000, gather=gather)
            for m, g in zip(self.models, groups, strict=True)
        ]
        self.expected = [SGD(m.parameters(), lr=0.5) for m in self.plain]

    def loss(self, models: list[Net], step: int, rank: int, without: tuple[int, int]) -> Tensor:
        """Of both models at once; `without` says which layer each rank leaves out of the second one."""
        x = inputs(step, rank)
        return (models[0](models[1](x, without[rank])) - models[1](x, without[rank])).square().mean()

    def plain_step(self, step: int, without: tuple[int, int]) -> None:
        for rank in range(2):
            (0.5 * self.loss(self.plain, step, rank, without)).backward()
        for optimizer in self.expected:
            optimizer.step()
            optimizer.zero_grad()

    def step(self, step: int, without: tuple[int, int], order: tuple[int, ...] = (0, 1)) -> None:
        self.loss(self.models, step, dist.get_rank(), without).backward()
        for i in order:
            self.optimizers[i].step()
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def wrong(self) -> list[str]:
        for optimizer in self.optimizers:
            optimizer.canzona.synchronize()
        return [
            f"{i}.{name}"
            for i, (one, two) in enumerate(zip(self.models, self.plain, strict=True))
            for (name, a), b in zip(one.named_parameters(), two.parameters(), strict=True)
            if not torch.equal(a, b)
        ]


def layer_left_out(own_groups: bool, gather: str) -> list[str]:
    """What differs from plain optimizers if one rank leaves a layer out."""
    pair = Pair(own_groups, gather)
    for step, without in enumerate([(-1, -1), (-1, 2), (1, -1), (3, 0), (-1, -1)]):
        pair.step(step, without)
        pair.plain_step(step, without)
    return pair.wrong()


def another_order(own_groups: bool) -> tuple[str, list[str]]:
    """What ranks say that step two models in another order, and what differs after they went on."""
    pair = Pair(own_groups)
    pair.step(0, (-1, -1))
    pair.plain_step(0, (-1, -1))
    said = attempt(lambda: pair.step(1, (-1, -1), (0, 1) if dist.get_rank() == 0 else (1, 0))).said
    for optimizer in pair.optimizers:
        optimizer.zero_grad()
    pair.step(2, (-1, -1))
    pair.plain_step(2, (-1, -1))
    return said, pair.wrong()


@pytest.mark.parametrize(("own_groups", "gather"), crossed([False, True], ["step", "forward"], most=3))
def test_a_layer_that_one_rank_leaves_out(own_groups: bool, gather: str) -> None:
    """Its model's buckets start later on that rank than the other model's; results are those of plain optimizers."""
    assert run(2, layer_left_out, own_groups, gather) == [[], []]


@pytest.mark.parametrize("own_groups", [False, True])
def test_models_that_are_stepped_in_another_order(own_groups: bool) -> None:
    for said, wrong in run(2, another_order, own_groups):
        assert re.search(r"made different calls.*rank 0: step\(\) of optimizer 0 .* of model (\d+); rank 1: .*", said)
        assert wrong == []
