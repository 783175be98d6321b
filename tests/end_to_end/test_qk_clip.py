"""The example of QK-Clip: sharded weights shrink as plain ones do, for one small all-reduce."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import canzona_compile
from canzona_compile.errors import UnsupportedOptimizer
from tests.harness.pairs import feed
from tests.harness.ranks import collectives, run
from tests.harness.traps.grammar import toy

DIM, HEAD = 24, 8


class Attention(nn.Module):
    """Three query heads that share one key head."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(DIM, 3 * HEAD, bias=False), nn.Linear(DIM, HEAD, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        query, key = self.query(x).unflatten(-1, (3, HEAD)), self.key(x).unsqueeze(-2)
        return (query * key).sum(-1).tanh()


def trained(sharded: bool, threshold: float) -> tuple[list[Tensor], int]:
    """The weights after three steps, and the collectives of the last clip."""
    from examples.qk_clip import QkClip

    torch.manual_seed(0)
    model = Attention()
    if sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    clip = QkClip(threshold)
    clip.watch(model.query, model.key, HEAD)
    optimizer = torch.optim.Muon(model.named_parameters(), lr=0.05)
    if sharded:
        canzona_compile.wrap(optimizer)
    started: list[int] = []

    def counted(*args: Any) -> None:
        before = collectives() if sharded else 0
        clip(*args)
        started.append(collectives() - before if sharded else 0)

    optimizer.register_step_post_hook(counted)
    for step in range(3):
        x = torch.randn(2, 5, DIM, generator=torch.Generator().manual_seed(step)) * 20  # the same on all ranks
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
    weights = [p.full_tensor() if sharded else p for p in model.parameters()]  # type: ignore[attr-defined]
    return [w.detach() for w in weights], started[-1]


def test_sharded_weights_shrink_alike() -> None:
    plain, _ = trained(False, 5.0)
    untouched, _ = trained(False, 1e9)
    assert all(float(a.norm()) < 0.9 * float(b.norm()) for a, b in zip(plain, untouched, strict=True))
    for weights, started in run(2, trained, True, 5.0):
        assert started == 1
        for found, expected in zip(weights, plain, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)  # gradients are averaged in other orders


# Clips weights of a module in its step.
HoldsModule = toy("holds-module", end="for weight in self.model.parameters():\n    weight.mul_(0.5)")()


def test_an_optimizer_that_writes_modules_is_sent_there() -> None:
    model = Attention()
    optimizer: Any = HoldsModule(list(model.parameters()))
    optimizer.model = model
    canzona_compile.wrap(optimizer)
    feed(optimizer, 0)
    with pytest.raises(UnsupportedOptimizer, match=r"self\.model") as caught:
        optimizer.step()
    assert "examples/qk_clip.py" in str(caught.value)
