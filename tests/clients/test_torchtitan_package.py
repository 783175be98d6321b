"""torchtitan's own container of optimizers with wrapped Muon in it, on two layers of its debug model under FSDP2."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim import Muon

import canzona_compile
from tests.harness.layouts import full
from tests.harness.pairs import same_bits
from tests.harness.ranks import run

WHY = "the package torchtitan, or one that it needs, is not installed"
containers = pytest.importorskip("torchtitan.components.optimizer", reason=WHY, exc_type=ImportError)
llama = pytest.importorskip("torchtitan.models.llama3", reason=WHY, exc_type=ImportError)
STEPS = 3
GROUPS = [
    containers.ParamGroupConfig(
        pattern=r"layers\..*(attention\.|feed_forward).*weight", optimizer_name="Muon", optimizer_kwargs={"lr": 0.02}
    ),
    containers.ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-3}),
]
CONFIG = containers.OptimizersContainer.Config(param_groups=GROUPS, implementation="for-loop")


class Plain(containers.OptimizersContainer):  # type: ignore[misc, name-defined]
    """With one more optimizer, as users add theirs."""

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Any:
        return Muon if name == "Muon" else containers.OptimizersContainer._resolve_optimizer_factory(name)


class Wrapped(Plain):
    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Any:
        kind = Plain._resolve_optimizer_factory(name)
        return canzona_compile.wrap_cls(kind, strategy="owner") if name == "Muon" else kind


def model_of() -> Any:
    from torchtitan.models.common.attention import ScaledDotProductAttention  # flex attention has no backward on CPUs

    torch.manual_seed(0)
    config = llama.llama3_configs["debugmodel"]("flex")
    config.layers = config.layers[:2]
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    model = config.build()
    model.init_states(buffer_device=torch.device("cpu"))
    return model


def train() -> tuple[list[str], list[str], list[str]]:
    """What differs from plain optimizers on whole tensors, the names of the tasks, and what the containers save."""
    model, whole = model_of(), model_of()
    for layer in model.layers.values():
        fully_shard(layer)
    fully_shard(model)
    ours, plain = Wrapped(CONFIG, model_parts=[model]), Plain(CONFIG, model_parts=[whole])
    wrong: list[str] = []
    for step in range(STEPS):
        tokens = torch.randint(0, 2048, (1, 16), generator=torch.Generator().manual_seed(step))
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())
        loss.backward()
        pairs = list(zip(model.named_parameters(), whole.parameters(), strict=True))
        for (_, sharded), param in pairs:
            param.grad = full(sharded.grad)
        ours.step()
        ours.zero_grad()
        plain.step()
        wrong += [
            f"{name} after step {step}"
            for (name, sharded), param in pairs
            if not same_bits(full(sharded.detach()), param.detach())
        ]
    plain.zero_grad()
    saved, expected = ours.state_dict(), plain.state_dict()
    wrong += [
        key for key in expected if torch.is_tensor(expected[key]) and not same_bits(full(saved[key]), expected[key])
    ]
    (muon,) = [one for one in ours if canzona_compile.is_wrapped(one)]
    return wrong, [task.name for task in muon.canzona.report().tasks], sorted(expected.keys() ^ saved.keys())


@pytest.mark.full
def test_its_container() -> None:
    names = [f"layers.{i}.{name}" for i in range(2) for name, _ in model_of().layers["0"].named_parameters()]
    matrices = [name for name in names if "norm" not in name]
    assert run(2, train) == [([], matrices, [])] * 2
