"""peft's LoRA adapters under FSDP2: only they are trained, by Muon, beside the plain optimizer on whole tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.optim import Muon

import canzona_compile
from tests.harness.beside import BesidePlain
from tests.harness.model_pairs import update
from tests.harness.ranks import run

peft = pytest.importorskip("peft", reason="the package peft is not installed")
STEPS = 3


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.v_proj = nn.Linear(16, 24), nn.Linear(16, 24)
        self.o_proj = nn.Linear(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.o_proj(torch.sigmoid(self.q_proj(x)) * self.v_proj(x))
        return out


def adapted() -> Any:
    torch.manual_seed(0)
    model = peft.get_peft_model(Decoder(), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    with torch.no_grad():  # B begins at zero, and A would have no gradient
        for name, param in model.named_parameters():
            if "lora_B" in name:
                param.normal_()
    return model


def trained(model: Any) -> list[tuple[str, Any]]:
    return [(name, param) for name, param in model.named_parameters() if param.requires_grad]


def train() -> tuple[list[str], list[str]]:
    """What differs from the plain optimizer, and the names of the tasks."""
    model = fully_shard(adapted())
    optimizer: Any = canzona_compile.wrap(Muon(trained(model), lr=0.1), strategy="owner")
    with BesidePlain() as beside:
        for step in range(STEPS):
            inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
            model(inputs).square().mean().backward()
            update([optimizer])
    return beside.finish(), [task.name for task in optimizer.canzona.report().tasks]


@pytest.mark.full
def test_adapters() -> None:
    names = [name for name, _ in trained(adapted())]
    assert len(names) == 4
    assert all("lora" in name for name in names)
    assert run(2, train) == [([], names)] * 2


def test_hidden_matrices_are_the_factors() -> None:
    """Those of an embedding and of a head are others, as what they adapt is; a module that is saved whole is itself."""
    model = nn.Module()
    model.embed, model.layers, model.score = nn.Embedding(32, 16), nn.ModuleList([Decoder()]), nn.Linear(16, 3)
    targets = ["embed", "q_proj", "v_proj"]
    config = peft.LoraConfig(r=4, target_modules=targets, modules_to_save=["score"])
    choice = canzona_compile.hidden_matrices(peft.get_peft_model(model, config))
    layer = "base_model.model.layers.0."
    expected = [f"{layer}{name}.lora_{ab}.default.weight" for name in ("q_proj", "v_proj") for ab in "AB"]
    assert [name for name, _ in choice.matrices] == expected
    others = {name.removeprefix("base_model.model.") for name, _ in choice.others}
    score = {f"score.modules_to_save.default.{name}" for name in ("weight", "bias")}
    assert others == {"embed.lora_embedding_A.default", "embed.lora_embedding_B.default", *score}
