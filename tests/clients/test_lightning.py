"""Lightning's Trainer with its strategy for FSDP2, beside the plain optimizer on whole tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.optim import Muon
from torch.utils.data import DataLoader

import canzona_compile
from tests.harness.beside import BesidePlain
from tests.harness.frameworks import running_ranks
from tests.harness.ranks import run

lightning = pytest.importorskip("lightning.pytorch", reason="the package lightning is not installed")
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]
STEPS = 4


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 20, bias=False), nn.SiLU(), nn.Linear(20, 4, bias=False))


class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.model: Any = None

    def configure_model(self) -> None:
        if self.model is None:
            self.model = fully_shard(model_of(), mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Tensor, number: int) -> Tensor:
        return F.mse_loss(self.model(batch), torch.ones(len(batch), 4))

    def configure_optimizers(self) -> Any:
        return canzona_compile.wrap(Muon(self.model.parameters(), lr=0.05), strategy="owner")


def train(folder: Path) -> tuple[list[str], int, list[str]]:
    """What differs from the plain optimizer, the number of ranks, and how matrices are computed."""
    from lightning.fabric.plugins.environments import LightningEnvironment
    from lightning.pytorch.strategies import ModelParallelStrategy

    module = Module()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=ModelParallelStrategy(data_parallel_size=dist.get_world_size(), tensor_parallel_size=1),
        plugins=[running_ranks(LightningEnvironment)],
        max_steps=STEPS,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = torch.randn(8 * STEPS, 12, generator=torch.Generator().manual_seed(1))
    with BesidePlain() as beside:
        trainer.fit(module, DataLoader(data, batch_size=4))  # type: ignore[arg-type]
    report = trainer.optimizers[0].canzona.report()
    return beside.finish(), report.world_size, sorted({task.strategy for task in report.tasks})


@pytest.mark.full
def test_fsdp2(tmp_path: Path) -> None:
    assert run(2, train, tmp_path, fresh=True) == [([], 2, ["owner"])] * 2
