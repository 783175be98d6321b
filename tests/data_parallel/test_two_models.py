"""Several models under zero1 on the same ranks: their collectives never meet one another's."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD

from tests.harness.layouts import mesh_of
from tests.harness.marks import crossed
from tests.harness.mistakes import attempt
from tests.harness.model_pairs import ModelPair, train, zero1
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


Without = tuple[int, int]  # the layer of the second model that each rank leaves out
NONE = (-1, -1)


class Both(ModelPair):
    """Two models with a loss of both, and the same ones with plain optimizers."""

    def __init__(self, own_groups: bool, gather: str = "step") -> None:
        mesh = mesh_of((dist.get_world_size(),), ("dp",))
        groups: list[Any] = [dist.new_group(backend="gloo") if own_groups else mesh for _ in range(2)]
        models, plain = (nn.ModuleList([Net(0), Net(1)]) for _ in range(2))
        pairs = zip(models, sgd(models), groups, strict=True)
        found = [zero1(model, own, mesh=group, bucket_bytes=2000, gather=gather) for model, own, group in pairs]
        self.without = NONE
        super().__init__(models, found, plain, sgd(plain), self.loss_of_both)

    def loss_of_both(self, models: Any, step: int, rank: int) -> Tensor:
        x = torch.randn(4, 24, generator=torch.Generator().manual_seed(100 * step + rank))
        without = self.without[rank]
        found: Tensor = (models[0](models[1](x, without)) - models[1](x, without)).square().mean()
        return found


def sgd(models: nn.ModuleList) -> list[SGD]:
    return [SGD(model.parameters(), lr=0.5) for model in models]


def layer_left_out(own_groups: bool, gather: str) -> list[str]:
    """What differs from plain optimizers if one rank leaves a layer out."""
    pair = Both(own_groups, gather)
    for step, pair.without in enumerate([NONE, (-1, 2), (1, -1), (3, 0), NONE]):
        pair.train(step)
    return pair.different()


def another_order(own_groups: bool) -> tuple[str, list[str]]:
    """What ranks say that step two models in another order, and what differs after they went on."""
    pair = Both(own_groups)
    pair.train(0)
    order = pair.optimizers[:: -1 if dist.get_rank() else 1]
    said = attempt(lambda: train(pair.model, order, 1, pair.loss)).said
    for optimizer in pair.optimizers:
        optimizer.zero_grad()
    pair.train(2)
    return said, pair.different()


@pytest.mark.parametrize(("own_groups", "gather"), crossed([False, True], ["step", "forward"], most=3))
def test_a_layer_that_one_rank_leaves_out(own_groups: bool, gather: str) -> None:
    """Its model's buckets start later on that rank than the other model's; results are those of plain optimizers."""
    assert run(2, layer_left_out, own_groups, gather) == [[], []]


@pytest.mark.parametrize("own_groups", [False, True])
def test_models_that_are_stepped_in_another_order(own_groups: bool) -> None:
    for said, wrong in run(2, another_order, own_groups):
        assert re.search(r"made different calls.*rank 0: step\(\) of optimizer 0 .* of model (\d+); rank 1: .*", said)
        assert wrong == []
