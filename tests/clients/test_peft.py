"""peft's LoRA adapters under FSDP2: only they are trained, by Muon, beside the plain optimizer on whole tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Muon

import canzona_compile
from canzona_compile.ir.split import rows_of
from tests.harness.beside import BesidePlain
from tests.harness.layouts import full
from tests.harness.model_pairs import update
from tests.harness.moe_models import moe_model
from tests.harness.ranks import run

peft = pytest.importorskip("peft", reason="the package peft is not installed")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers
STEPS = 3


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.v_proj = nn.Linear(16, 24), nn.Linear(16, 24)
        self.o_proj = nn.Linear(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.o_proj(torch.sigmoid(self.q_proj(x)) * self.v_proj(x))
        return out


def adapted(dora: bool = False) -> Any:
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], use_dora=dora)
    model = peft.get_peft_model(Decoder(), config)
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


def train_dora() -> tuple[list[str], list[str]]:
    """What differs from the plain optimizer, and what AdamW trains."""
    model = fully_shard(adapted(dora=True))
    optimizer: Any = canzona_compile.muon_adamw(model, lr=0.1)
    with BesidePlain() as beside:
        for step in range(STEPS):
            inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
            model(inputs).square().mean().backward()
            update([optimizer])
    return beside.finish(), [name for name, _ in canzona_compile.hidden_matrices(model).others]


@pytest.mark.full
def test_dora() -> None:
    magnitudes = [f"base_model.model.{name}.lora_magnitude_vector.default.weight" for name in ("q_proj", "v_proj")]
    assert run(2, train_dora) == [([], magnitudes)] * 2


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


def adapted_experts() -> Any:
    stacks = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    torch.manual_seed(0)
    config = peft.LoraConfig(r=3, lora_alpha=6, target_modules=[], target_parameters=stacks)
    return peft.get_peft_model(moe_model("mixtral"), config)


def test_factors_of_each_expert() -> None:
    """PEFT keeps those of all experts in one A and one B. A part of either reaches the weights of one expert only."""
    model = adapted_experts()
    choice = canzona_compile.hidden_matrices(model)
    assert len(choice.splits) == len(choice.matrices) == 8
    assert {row.why for row in choice.rows if row.kind == "matrix"} == {
        "expert0, expert1, expert2 and expert3 in equal blocks of rows",
        "expert0, expert1, expert2 and expert3 in alternating columns",
    }
    params = dict(choice.matrices)
    for name, split in choice.splits.items():
        wrapper: Any = model.get_submodule(name.partition(".lora_")[0])
        with torch.no_grad():
            for factor in (wrapper.lora_A, wrapper.lora_B):
                factor["default"].weight.fill_(1.0)
            for expert, (part, rows) in enumerate(rows_of(split).items()):
                assert part == f"expert{expert}"
                params[name].index_fill_(split.dim, rows, 0.0)
                assert wrapper.get_delta_weight("default").any(-1).any(-1).tolist() == [i > expert for i in range(4)]


def test_factors_of_adapters_of_several_ranks() -> None:
    """Both are active; the first one has no factors of experts."""
    model, stacks = adapted_experts(), ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    model.add_adapter("text", peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=stacks))
    model.base_model.set_adapter(["text", "default"])
    choice = canzona_compile.hidden_matrices(model)
    sizes = {name.split(".")[-2]: split.parts[0][1] for name, split in choice.splits.items()}
    assert sizes == {"default": 3, "text": 2}


def stepped(ranks: int) -> list[Tensor]:
    """The factors after a few steps on gradients that are the same for any number of ranks."""
    model = adapted_experts()
    if ranks > 1:
        fully_shard(model)
    optimizer = canzona_compile.muon_adamw(model, lr=0.1)
    for step in range(STEPS):
        random = torch.Generator().manual_seed(step)
        for _, param in trained(model):
            grad = torch.randn(param.shape, generator=random)
            sharded = isinstance(param, DTensor)
            param.grad = distribute_tensor(grad, param.device_mesh, param.placements) if sharded else grad
        optimizer.step()
    return [full(param) for _, param in trained(model)]


@pytest.mark.full
def test_factors_of_each_expert_on_ranks() -> None:
    alone = stepped(1)
    assert [list(map(torch.equal, alone, found)) for found in run(2, stepped, 2)] == [[True] * len(alone)] * 2
