"""Ways in which models run under FSDP2, each beside the plain optimizer on whole tensors with the same gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.optim import Muon

import canzona_compile
from tests.harness import model_pairs
from tests.harness.beside import BesidePlain
from tests.harness.optimizers import share_captures
from tests.harness.ranks import run

STEPS = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 20, bias=False), nn.Linear(20, 12, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.up(x)))


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block())


def loss_of(model: Any, step: int, rank: int = 0) -> Tensor:
    """On all ranks the same, so that an average over two of them is exact."""
    inputs = torch.randn(8, 12, generator=torch.Generator().manual_seed(step))
    return model(inputs).float().square().mean()


# -- ways --------------------------------------------------------------------------------------------


def sharded(model: nn.Sequential, **options: Any) -> nn.Sequential:
    for block in model:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def checkpointed() -> Any:
    model = model_of()
    for i, block in enumerate(model):
        model[i] = checkpoint_wrapper(block)
    return sharded(model)


def compiled_in_place() -> Any:
    model = model_of()
    for block in model:
        block.compile(backend="aot_eager")
    return sharded(model)


MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
WAYS: dict[str, Callable[[], Any]] = {
    "mixed precision": lambda: sharded(model_of(), mp_policy=MIXED),
    "not resharded": lambda: sharded(model_of(), reshard_after_forward=False),
    "offloaded": lambda: sharded(model_of(), offload_policy=CPUOffloadPolicy(pin_memory=False)),
    "checkpointed": checkpointed,
    "compiled": lambda: torch.compile(sharded(model_of()), backend="aot_eager"),
    "compiled in place": compiled_in_place,
}


# -- training ----------------------------------------------------------------------------------------


def muon(params: Any) -> Any:
    optimizer = Muon(params, lr=0.1)
    share_captures(canzona_compile.wrap(optimizer))
    return optimizer


def alone() -> None:
    model = model_of()
    model_pairs.train_alone(model, [Muon(model.named_parameters(), lr=0.1)], loss_of)


def train(way: str) -> tuple[list[str], list[str]]:
    """What differs from the plain optimizer, and the names of the tasks."""
    model = WAYS[way]()
    optimizer = muon(model.named_parameters())
    with BesidePlain() as beside:
        model_pairs.train(model, [optimizer], STEPS, loss_of)
    report = optimizer.canzona.report()
    assert report.fallbacks == {}
    return beside.finish(), [task.name for task in report.tasks]


@pytest.mark.parametrize("way", WAYS)
def test_a_way(way: str) -> None:
    names = [f"{i}.{layer}.weight" for i in range(2) for layer in ("up", "down")]
    assert run(2, train, way, after=partial(alone)) == [([], names)] * 2


# -- steps inside of backward ------------------------------------------------------------------------


def train_in_backward() -> list[str]:
    """One optimizer per parameter, which steps as soon as its gradient is complete."""
    model = sharded(model_of())
    own = {param: muon([(name, param)]) for name, param in model.named_parameters()}
    stepped: list[Any] = []

    def step(param: Any) -> None:
        own[param].step()
        own[param].zero_grad()
        stepped.append(param)

    for param in own:
        param.register_post_accumulate_grad_hook(step)
    with BesidePlain() as beside:
        for number in range(STEPS):
            loss_of(model, number).backward()
    assert len(stepped) == STEPS * len(own)
    return beside.finish()


def test_optimizers_in_backward() -> None:
    assert run(2, train_in_backward, after=partial(alone)) == [[], []]
