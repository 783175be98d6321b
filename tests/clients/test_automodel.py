"""NeMo AutoModel's own dispatcher of optimizers, which makes ours by the name that a recipe has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from canzona_compile.errors import CanzonaError
from tests.harness.beside import BesidePlain
from tests.harness.ranks import run

WHY = "the package nemo-automodel is not installed"
automodel = pytest.importorskip("nemo_automodel.components.optim.optimizer", reason=WHY, exc_type=ImportError)
CONFIGS = "canzona_compile.integrations.automodel"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.up = nn.Linear(32, 96, bias=False)
        self.down = nn.Linear(96, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.down(nn.functional.gelu(self.up(self.norm(x))))
        return x + found


def trained(name: str) -> tuple[int, list[str], set[str]]:
    """How many parameters are compared with those of plain optimizers, which differ, and what steps them."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Embedding(64, 32), Block(), Block(), nn.Linear(32, 64))
    for block in model[1:3]:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    (optimizer,) = automodel.build_optimizer(model, (f"{CONFIGS}.{name}", {"lr": 1e-2}), device_mesh=mesh)
    torch.manual_seed(mesh["dp"].get_local_rank())
    with BesidePlain() as beside:
        for _ in range(4):
            tokens = torch.randint(64, (32,))
            nn.functional.cross_entropy(model(tokens), tokens.roll(1)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return beside.compared, beside.differing, set(beside.ways)


@pytest.mark.parametrize(("name", "matrices"), [("MuonAdamWConfig", "Muon"), ("SOAPAdamWConfig", "SOAP")])
def test_a_recipe_names_ours(name: str, matrices: str) -> None:
    for compared, differing, kinds in run(4, trained, name):
        assert differing == []
        assert compared > 20
        assert kinds == {matrices, "AdamW"}


def test_what_it_cannot_pass_on_is_refused() -> None:
    with pytest.raises(CanzonaError, match="param_group_overrides= is for AutoModel"):
        automodel.build_optimizer_config(f"{CONFIGS}.MuonAdamWConfig", {"param_group_overrides": [{"pattern": "norm"}]})
    config = automodel.build_optimizer_config(f"{CONFIGS}.MuonAdamWConfig", {"lr": 1e-3})
    with pytest.raises(CanzonaError, match="parameter groups do not say"):
        config.build_from_param_groups([{"params": []}])
